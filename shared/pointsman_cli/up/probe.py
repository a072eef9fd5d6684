"""The one question `up` asks of others: does this URL answer?"""

import asyncio
import os
from urllib.parse import urlsplit

ANSWER_BYTES_MAX = 1 << 20


class NoAnswerError(Exception):
    """Nobody answered in time, or not in HTTP; the message says which."""


async def http_get(url: str, *, timeout: float) -> tuple[int, bytes]:
    """Status and body (at most 1 MiB) of a GET, within `timeout` wall seconds. Raises NoAnswerError.

    The client is imported with the first question: that takes a quarter of a second, in which the processes that are
    asked are starting anyway. It asks from the event loop: this process forks, and must have no threads (`adapters.child_process`).
    """
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.get(url, allow_redirects=False, headers={"connection": "close"}) as answer,
        ):
            body = b""
            while len(body) < ANSWER_BYTES_MAX and (chunk := await answer.content.read(ANSWER_BYTES_MAX - len(body))):
                body += chunk
            return answer.status, body
    except TimeoutError as error:
        message = f"no answer within {timeout:g} s"
        raise NoAnswerError(message) from error
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno
        raise NoAnswerError(os.strerror(number) if number else str(error)) from error
    except aiohttp.ClientResponseError as error:
        message = "the answer is not HTTP"
        raise NoAnswerError(message) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error


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
