"""The one question `up` asks of others: does this URL answer?"""

import asyncio
from urllib.parse import urlsplit

ANSWER_BYTES_MAX = 1 << 20


class NoAnswerError(Exception):
    """Nobody answered in time, or not in HTTP; the message says which."""


async def http_get(url: str, *, timeout: float) -> tuple[int, bytes]:
    """Status and body (at most 1 MiB) of a GET, within `timeout` wall seconds. Raises NoAnswerError.

    A handful of lines over a socket, because importing an HTTP client takes longer than starting a nats-server.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
            )
            try:
                writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
                answer = await reader.read(ANSWER_BYTES_MAX)
                while chunk := await reader.read(ANSWER_BYTES_MAX - len(answer)):
                    answer += chunk
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(maxsplit=2)[1]), body
    except TimeoutError as error:
        message = f"no answer within {timeout:g} s"
        raise NoAnswerError(message) from error
    except OSError as error:
        raise NoAnswerError(error.strerror or str(error)) from error
    except (IndexError, ValueError) as error:
        message = "the answer is not HTTP"
        raise NoAnswerError(message) from error


async def accepts_connections(url: str, *, timeout: float) -> bool:
    """Whether something listens at the URL's host and port."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
