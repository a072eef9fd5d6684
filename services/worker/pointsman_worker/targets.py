"""Targets completed by the worker's settings: what a source leaves open, `{host}` in addresses, data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import click

from pointsman.adapters.discovery.targets import (
    TargetError,
    by_rank,
    checked_endpoint,
    engine_targets,
    host_and_port,
    rank_endpoint,
    with_host,
)
from pointsman.contracts.fleet import ANY_RANK
from pointsman.contracts.subjects import valid_name
from pointsman.ports import EngineTarget
from pointsman.primitives import InstanceId
from pointsman.runtime.engine_urls import EngineUrls
from pointsman_worker.settings import DEFAULT_ENGINE_URL, WorkerSettings

HOST = "{host}"


def listed_targets(settings: WorkerSettings) -> list[EngineTarget]:
    """Engines of --engine-url; without --discover there is one by default. Raises click.UsageError."""
    urls = settings.engine_url or (() if settings.discover else (DEFAULT_ENGINE_URL,))
    _check(settings, urls)
    try:
        _check_addresses(settings)
        return [target for url in urls for target in _listed(url, settings, alone=len(urls) == 1)]
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def refused_url(target: EngineTarget, allowed: EngineUrls | None) -> str:
    """Why the worker asks nothing there, nor listens; empty: it does. `allowed` None: any."""
    if allowed is None:
        return ""
    host, _ = host_and_port(target.url)
    for endpoint in (target.kv_endpoint, target.kv_replay_endpoint):
        other = _host_of(endpoint)
        if other and other != host:
            return f"{target.instance}: {endpoint} is another host than {target.url}, and --discover-urls is set"
    covered = allowed.cover(target.instance, target.url)
    return "" if covered else f"{target.instance}: {target.url} is not among --discover-urls"


def _host_of(endpoint: str) -> str:
    return (urlsplit(endpoint).hostname or "") if endpoint.startswith("tcp://") else ""


def completed_targets(target: EngineTarget, settings: WorkerSettings) -> list[EngineTarget]:
    """One, or one per rank of the setting where the source says nothing of ranks. Raises TargetError."""
    if target.dp_rank is None and settings.data_parallel_size > 1:
        return [completed(ranked, settings) for ranked in by_rank(target, settings.data_parallel_size)]
    return [completed(target, settings)]


def completed(target: EngineTarget, settings: WorkerSettings) -> EngineTarget:
    """Raises TargetError."""
    host, port = host_and_port(target.url)
    rank = settings.dp_rank if target.dp_rank is None else target.dp_rank

    def own_or(endpoint: str, template: str) -> str:
        return endpoint or rank_endpoint(with_host(template, host), max(0, rank))

    try:
        return replace(
            target,
            advertised_url=target.advertised_url or _advertised_url(settings, host, port),
            kv_endpoint=own_or(target.kv_endpoint, settings.kv_endpoint),
            kv_replay_endpoint=own_or(target.kv_replay_endpoint, settings.kv_replay_endpoint),
            dp_rank=rank,
            role=target.role or settings.role,
            engine_model=target.engine_model or settings.engine_model,
        )
    except ValueError as error:
        raise TargetError(f"{target.instance}: {error}") from error


def _advertised_url(settings: WorkerSettings, host: str, port: int) -> str:
    return with_host(settings.engine_advertised_url, host).replace("{port}", str(port))


def _listed(url: str, settings: WorkerSettings, *, alone: bool) -> list[EngineTarget]:
    _, port = host_and_port(url)
    name = settings.instance or (f"engine-{port}" if alone else "")
    if settings.dp_rank != ANY_RANK and not settings.instance:
        name = f"{name}-rank-{settings.dp_rank}"
    (target,) = engine_targets(url=url, name=name)
    if settings.instance:
        target = replace(target, instance=InstanceId(settings.instance))
    return completed_targets(target, settings)


def _check(settings: WorkerSettings, urls: Sequence[str]) -> None:
    if settings.instance and not valid_name(settings.instance):
        raise click.UsageError(
            f"{settings.instance!r} cannot be an instance: lower-case letters, digits and dashes, at most 63"
        )
    if settings.dp_rank != ANY_RANK and settings.data_parallel_size > 1:
        raise click.UsageError("--dp-rank follows one rank, --data-parallel-size all: give one of them")
    transfers = settings.fetches or settings.role_switching or settings.role != "both" or settings.discover
    if settings.kv_transfer_gb_per_s and not transfers:
        raise click.UsageError(
            "--kv-transfer-gb-per-s is of transfers, and this worker's engines make none: give --fetches or a --role"
        )
    if not settings.discover and len(urls) == 1:
        return
    for flag, value in (("--kv-endpoint", settings.kv_endpoint), ("--kv-replay-endpoint", settings.kv_replay_endpoint),
                        ("--engine-advertised-url", settings.engine_advertised_url)):  # fmt: skip
        if value and HOST not in value:
            raise click.UsageError(f"{flag} {value}: several engines need {HOST} in it")
    if settings.instance or settings.dp_rank != ANY_RANK:
        raise click.UsageError("--instance and --dp-rank are of a worker that follows one engine")


def _check_addresses(settings: WorkerSettings) -> None:
    """Those of discovered engines too, whatever their host. Raises TargetError."""
    checked_endpoint(with_host(settings.kv_endpoint, "host"), "--kv-endpoint")
    checked_endpoint(with_host(settings.kv_replay_endpoint, "host"), "--kv-replay-endpoint")
    if settings.engine_advertised_url:
        host_and_port(_advertised_url(settings, "host", 80))
