"""Bodies of HTTP answers, read up to a bound."""

import aiohttp


async def bounded_body(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes | None:
    """None if it is larger; then the connection is closed. Raises what aiohttp raises."""
    pieces, size = list[bytes](), 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > bytes_max:
            answer.close()
            return None
    return b"".join(pieces)
