"""Wires the parts of an ingress. In: settings, a link per pool. Out: its API and the pages of its admin port, with their
background tasks started."""

import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from random import Random, SystemRandom

import aiohttp
import click

from pointsman.adapters.tokenizer import Tokenizer, TokenizerLoadError
from pointsman.contracts.cache_salts import CacheSalts
from pointsman.ports import Clock, KeyValueStore, Link
from pointsman.primitives import PoolName
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.line_writer import LineWriter, Output
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tenant_policies import FollowedPolicies
from pointsman.runtime.tracing import Tracer
from pointsman_ingress.access_log import AccessLog
from pointsman_ingress.app import IngressApps, ingress_app
from pointsman_ingress.endpoints import BodyRules
from pointsman_ingress.engine.client import EngineClient, open_session
from pointsman_ingress.engine.session import DirectSession
from pointsman_ingress.http.api_keys import ApiKeys
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.call import BodyBudget, RequestIds
from pointsman_ingress.http.cross_origin import served_to
from pointsman_ingress.key_probe import KeyProber
from pointsman_ingress.metrics import forget_departed
from pointsman_ingress.overlap import PATH as OVERLAP_PATH
from pointsman_ingress.overlap import OverlapEndpoint
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.hold_queue import HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests, send_heartbeats
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.placement.retry_budget import RetryBudget
from pointsman_ingress.placement.scheduler_client import SchedulerClient, SchedulerLiveness
from pointsman_ingress.prompt.block_keys import BlockKeys
from pointsman_ingress.prompt.body_fields import FieldRules
from pointsman_ingress.prompt.remote_media import MediaRules
from pointsman_ingress.prompt.tokenization import PromptTokenizer
from pointsman_ingress.resolver import RequestResolver
from pointsman_ingress.service import Gateway
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.work_threads import WorkThreads

BUILTIN_TOKENIZER = "builtin"


@asynccontextmanager
async def assembled(
    settings: IngressSettings,
    links: Mapping[PoolName, Link],
    *,
    clock: Clock,
    board: HealthBoard,
    supervisor: Supervisor,
    engine_session: AbstractAsyncContextManager[aiohttp.ClientSession] | None = None,
    chance: Random | None = None,
    pool_boards: Mapping[PoolName, HealthBoard] | None = None,
    access_log_out: Output | None = None,
    executor: Executor | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[IngressApps]:
    """`links`: one per pool. `engine_session`: replaces HTTP to engines. `chance`: source of ids and probes.
    `executor`: replaces the threads for large bodies. Raises click.ClickException if a tokenizer is unreadable."""
    access = next(iter(links.values())).access  # one store for all pools
    chance = chance or SystemRandom()
    policies = FollowedPolicies(access)
    salts = None
    if not settings.trusts_clients:
        salts = CacheSalts(settings.secret.encode(), lambda tenant: policies.of(tenant).cache_group)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(engine_session or open_session(traced=tracer is not None))
        direct = DirectSession(session) if engine_session is None and tracer is None else None
        urls, work = EngineUrls.of(settings.engine_urls), WorkThreads(executor=executor)
        stack.callback(work.close)
        parts = IngressParts(
            settings=replace(settings, name=settings.process_name),
            clock=clock,
            supervisor=supervisor,
            authentication=_authentication(settings, access, clock=clock, board=board, supervisor=supervisor),
            salts=salts,
            policies=policies,
            engines=EngineClient(
                session,
                urls,
                keys=settings.engine_keys,
                forward_authorization=settings.trusts_clients,
                chunk_timeout_seconds=settings.chunk_timeout_seconds,
                direct=direct,
            ),
            work=work,
            ids=RequestIds(chance),
            bodies=BodyBudget.of_process(settings.processes, settings.body_bytes_max),
            tracer=tracer,
        )
        served, hold = [], HoldQueue(settings.hold_seconds, clock)
        for name, link in links.items():
            pool_board = (pool_boards or {}).get(name, board)
            pool = _pool(parts, urls, hold, name, link, pool_board)
            if settings.probe:
                supervisor.start(KeyProber(parts, pool, pool_board, chance).run(), name=f"probe-{name}")
            served.append(pool)
        pools = Pools(served, hold)
        access_log = None
        if settings.access_log:
            out = access_log_out or FileIO(sys.stdout.fileno(), "w", closefd=False)
            access_log = AccessLog(stack.enter_context(LineWriter(out)), clock)
        gateway = Gateway(parts, RequestResolver(parts, pools, _body_rules(settings)), access_log)
        supervisor.start(policies.follow(), name="tenant-policies")
        overlap = OverlapEndpoint(parts, pools, {name: link.commands for name, link in links.items()})
        yield IngressApps(served_to(ingress_app(gateway), settings.cors_origin), {OVERLAP_PATH: overlap.serve})


def _authentication(
    settings: IngressSettings, access: KeyValueStore, *, clock: Clock, board: HealthBoard, supervisor: Supervisor
) -> Authentication:
    """Starts what follows keys and issuer."""
    keys = tokens = None
    if settings.require_keys:
        keys = ApiKeys(settings.secret, clock, board)
        supervisor.start(keys.follow(access), name="api-keys")
    if settings.oidc_issuer:
        from pointsman_ingress.http.issuer_keys import IssuerKeys  # they import cryptography, and few need them
        from pointsman_ingress.http.oidc import TokenVerifier

        issuer_keys = IssuerKeys(
            settings.oidc_issuer, settings.oidc_jwks_url, clock, board, serves_without=settings.require_keys
        )
        tokens = TokenVerifier(
            issuer_keys,
            clock,
            issuer=settings.oidc_issuer,
            audience=settings.oidc_audience,
            tenant_claim=settings.oidc_tenant_claim,
        )
        supervisor.start(issuer_keys.follow(), name="oidc-keys")
    return Authentication(keys, tokens, origins=settings.cors_origin)


def _body_rules(settings: IngressSettings) -> BodyRules:
    trusted, allowed = settings.trusts_clients, settings.allow_field
    return BodyRules(
        FieldRules(trusted=trusted, allowed=allowed),
        MediaRules(trusted=trusted, hosts=settings.media_hosts, allowed=allowed),
    )


def _pool(
    parts: IngressParts, urls: EngineUrls, hold: HoldQueue, name: PoolName, link: Link, board: HealthBoard
) -> Pool:
    """Starts the pool's background tasks. Raises click.ClickException."""
    settings, clock, supervisor = parts.settings, parts.clock, parts.supervisor
    fleet = FleetView(clock, board, urls)
    in_flight = InFlightRequests(fleet=fleet, events=link.log, clock=clock)
    liveness = SchedulerLiveness(
        commands=link.commands,
        pool=name,
        clock=clock,
        board=board,
        timeout_seconds=settings.scheduler_timeout_seconds,
    )
    scheduler = SchedulerClient(
        commands=link.commands,
        fleet=fleet,
        in_flight=in_flight,
        liveness=liveness,
        pool=name,
        clock=clock,
        hold=hold,
    )
    tokenizer = PromptTokenizer(
        tokenizer=_tokenizer(settings.pool_tokenizers.get(name, settings.tokenizer)),
        engine=in_flight.least_busy,
        engines=parts.engines,
        clock=clock,
        failed=in_flight.failed,
        work=parts.work,
    )
    supervisor.start(fleet.follow(link.log), name=f"fleet-view-{name}")
    supervisor.start(liveness.watch(), name=f"scheduler-watch-{name}")
    others = (in_flight.forget_departed, tokenizer.forget_departed)
    supervisor.start(forget_departed(fleet, name, clock, others), name=f"metrics-{name}")
    heartbeats = send_heartbeats(in_flight, link.commands, name, clock, lambda: scheduler.newest_term, settings.name)
    supervisor.start(heartbeats, name=f"heartbeat-{name}")
    return Pool(
        name=name,
        fleet=fleet,
        in_flight=in_flight,
        scheduler=scheduler,
        tokenizer=tokenizer,
        block_keys=BlockKeys(
            secret=settings.secret.encode(), block_tokens=lambda: fleet.block_tokens, proven=not settings.probe
        ),
        events=link.log,
        retry_budget=RetryBudget(settings.retry_budget, name),
    )


def _tokenizer(directory: str) -> Tokenizer | None:
    """Raises click.ClickException."""
    if not directory:
        return None
    try:
        return Tokenizer.builtin() if directory == BUILTIN_TOKENIZER else Tokenizer.load(Path(directory))
    except TokenizerLoadError as error:
        raise click.ClickException(str(error)) from error
