"""HTTP and TCP probes of processes that `up` starts or joins."""

import asyncio
import json
import os
from http import HTTPStatus
from urllib.parse import urlsplit

import click

ANSWER_BYTES_MAX = 1 << 20
ENGINE_ANSWER_SECONDS = 5.0


class NoAnswerError(Exception):
    """No answer in time, or not HTTP."""


async def http_get(url: str, *, timeout: float, api_key: str = "") -> tuple[int, bytes]:
    """Status and body (at most 1 MiB) of a GET. Raises NoAnswerError. Uses no threads, since this process forks;
    imports aiohttp late (0.25 s)."""
    import aiohttp

    headers = {"connection": "close"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.get(url, allow_redirects=False, headers=headers) as answer,
        ):
            body = b""
            while len(body) < ANSWER_BYTES_MAX and (chunk := await answer.content.read(ANSWER_BYTES_MAX - len(body))):
                body += chunk
            return answer.status, body
    except TimeoutError as error:
        raise NoAnswerError(f"no answer within {timeout:g} s") from error
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno
        raise NoAnswerError(os.strerror(number) if number else str(error)) from error
    except aiohttp.ClientResponseError as error:
        raise NoAnswerError("the answer is not HTTP") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error


async def accepts_connections(url: str, *, timeout: float) -> bool:
    try:
        parts = urlsplit(url)
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
    except (OSError, TimeoutError, ValueError):  # ValueError: its host or port can be none
        return False
    writer.close()
    return True


async def model_of(url: str, api_key: str) -> str:
    """The first model that an engine serves. Raises click.ClickException."""
    try:
        status, body = await http_get(f"{url}/v1/models", timeout=ENGINE_ANSWER_SECONDS, api_key=api_key)
        if status == HTTPStatus.OK:
            return str(json.loads(body)["data"][0]["id"])
        problem = f"/v1/models answers {status}"
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            problem += "; give its key with POINTSMAN_ENGINE_API_KEY"
    except NoAnswerError as error:
        problem = str(error)
    except (ValueError, LookupError, TypeError):
        problem = "/v1/models names no model"
    raise click.ClickException(f"the engine {url} is of no use: {problem}")
