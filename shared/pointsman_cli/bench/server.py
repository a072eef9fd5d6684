"""The server that `pointsman bench` loads: a fresh fleet, a running one, or any OpenAI-compatible server."""

from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import click

from pointsman.runtime.settings import FleetSettings
from pointsman_cli.discovery import FleetFile, fleet_at, running_fleets

DEFAULT_SLO_TTFT_S = 5.0
CHECK_WALL_SECONDS = 5.0


class UnreachableError(click.ClickException):
    """No usable server at the URL; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    policy: str
    speed: float
    slo_ttft_s: float
    rebalancing: str | None = None
    log: FleetSettings | None = None


def server_of(fleet: FleetFile, speed: float | None = None) -> Server:
    return Server(
        url=fleet.ingress.rstrip("/"), policy=fleet.policy, speed=speed or fleet.speed, slo_ttft_s=fleet.slo_ttft
    )


def running_server(url: str | None, place: str | None, speed: float | None) -> Server:
    """The server at the URL, or the fleet of `--from`. Raises NoFleetError, SeveralFleetsError."""
    if url is None:
        return server_of(fleet_at(place), speed)
    url = url.rstrip("/").removesuffix("/v1")
    known = next((fleet for fleet in running_fleets() if fleet.ingress.rstrip("/") == url), None)
    if known is not None:
        return server_of(known, speed)
    return Server(url=url, policy="unknown", speed=speed or 1.0, slo_ttft_s=DEFAULT_SLO_TTFT_S)


async def served_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """The first model of the server, and its longest context if known. Raises UnreachableError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=CHECK_WALL_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models", headers=headers) as answer,
        ):
            if answer.status == HTTPStatus.UNAUTHORIZED:
                raise UnreachableError(f"{url} asks for an API key; set POINTSMAN_API_KEY")
            model = (await answer.json())["data"][0]
            return str(model["id"]), model.get("max_model_len")
    except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
        raise UnreachableError(
            f"nothing answers at {url} ({str(error) or type(error).__name__}); start a fleet with: pointsman up"
        ) from error
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise UnreachableError(
            f"{url} does not look like an OpenAI-compatible server: /v1/models names no model"
        ) from error
