"""A complete simulated engine: model, clock, KV events, HTTP."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pointsman.adapters.clocks import ScaledClock, SteadyClock
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.ports import Clock
from pointsman.primitives import Tokens
from pointsman.runtime.health import HttpServer
from pointsman.runtime.supervision import Supervisor
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import EngineSettings
from pointsman.state.engine_profiles import PROFILES
from pointsman_engine_sim.app import EngineApp
from pointsman_engine_sim.engine import LiveEngine
from pointsman_engine_sim.generation import ServedModel
from pointsman_engine_sim.kv_connector import parse_kv_transfer_config
from pointsman_engine_sim.kv_events import EventFaults, KvEventPublisher, parse_kv_events_config
from pointsman_engine_sim.metrics import EngineMetrics
from pointsman_engine_sim.misbehaviour import MisbehavingApp
from pointsman_engine_sim.settings import EngineSimSettings
from pointsman_engine_sim.wording import Wording

if TYPE_CHECKING:
    from pointsman_engine_sim.kv_transfer import KvTransfer

log = structlog.get_logger()

START_POLL_SECONDS = 0.01
GIB = 1 << 30


class EngineServer:
    def __init__(self, *, http: HttpServer, host: str, model: EngineModel, publisher: KvEventPublisher | None) -> None:
        self.url = f"http://{host}:{http.bound_port}"
        self.model = model
        self.events_endpoint = None if publisher is None else publisher.endpoint
        self.replay_endpoint = None if publisher is None else publisher.replay_endpoint


@contextlib.asynccontextmanager
async def engine_server(settings: EngineSimSettings, supervisor: Supervisor) -> AsyncIterator[EngineServer]:
    """Background tasks belong to the supervisor. Raises ValueError, OSError or TokenizerLoadError."""
    tokenizer, wording = await asyncio.to_thread(_vocabulary, settings)
    model = engine_model(settings)
    publisher = _publisher(settings)
    metrics = EngineMetrics(model, model_name=settings.model)
    clock = SteadyClock(ScaledClock(settings.speed))
    engine = LiveEngine(model, clock=clock, wording=wording, publisher=publisher, timings=metrics)
    transfer = _transfer(settings, clock, engine)
    app = EngineApp(engine, tokenizer=tokenizer, metrics=metrics, served=_served(settings, model), transfer=transfer)
    http = HttpServer(
        MisbehavingApp(app, slow_down=engine.slow_down, forget=engine.forget_cache),
        host=settings.host,
        port=settings.port,
    )
    supervisor.start(engine.run(), name="engine-steps")
    if publisher is not None:
        supervisor.start(publisher.run(), name="event-replays")
    async with _listening(supervisor, http, engine):
        server = EngineServer(http=http, host=settings.host, model=model, publisher=publisher)
        if transfer is not None:
            transfer.url = server.url
        log.info("engine_ready", url=server.url, events=server.events_endpoint, replay=server.replay_endpoint)
        try:
            yield server
        finally:
            if transfer is not None:
                await transfer.close()


def check(settings: EngineSimSettings) -> None:
    ScaledClock(settings.speed)
    engine_model(settings)
    _adapters(settings)
    parse_kv_events_config(settings.kv_events_config)
    parse_kv_transfer_config(settings.kv_transfer_config)


def engine_model(settings: EngineSimSettings) -> EngineModel:
    """Raises ValueError."""
    profile = PROFILES[settings.engine_model]
    return EngineModel(
        profile,
        EngineSettings(
            block_size=settings.block_size,
            num_gpu_blocks=settings.num_gpu_blocks_override,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            seed=settings.seed,
            host_blocks=int(settings.kv_offloading_size * GIB / (profile.kv_bytes_per_token * settings.block_size)),
        ),
    )


@contextlib.asynccontextmanager
async def _listening(supervisor: Supervisor, http: HttpServer, engine: LiveEngine) -> AsyncIterator[None]:
    """Ends open streams with an error before the server closes, so that it need not wait for them."""
    ended = asyncio.Event()

    async def serve() -> None:
        try:
            await http.serve()
        finally:
            ended.set()

    supervisor.start(serve(), name="http")
    while not (http.started or ended.is_set()):  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(START_POLL_SECONDS)
    if ended.is_set():
        await supervisor.until_stopped()  # which raises why
    try:
        yield
    finally:
        engine.stop()
        http.should_exit = True
        await ended.wait()


def _vocabulary(settings: EngineSimSettings) -> tuple[Tokenizer, Wording]:
    if not settings.tokenizer:
        return _builtin_vocabulary(settings.seed)
    tokenizer = Tokenizer.load(Path(settings.tokenizer))
    return tokenizer, Wording(tokenizer, seed=settings.seed)


@functools.cache
def _builtin_vocabulary(seed: int) -> tuple[Tokenizer, Wording]:
    """Scanned once for all engines of a process."""
    tokenizer = Tokenizer.builtin()
    return tokenizer, Wording(tokenizer, seed=seed)


def _publisher(settings: EngineSimSettings) -> KvEventPublisher | None:
    config = parse_kv_events_config(settings.kv_events_config)
    if not config.publishes:
        return None
    faults = EventFaults(drop_every=settings.fault_drop_event_batches, lose_every=settings.fault_lose_event_batches)
    return KvEventPublisher(config, block_size=settings.block_size, faults=faults)


def _transfer(settings: EngineSimSettings, clock: Clock, engine: LiveEngine) -> "KvTransfer | None":
    if parse_kv_transfer_config(settings.kv_transfer_config) is None:
        return None
    from pointsman_engine_sim.kv_transfer import KvTransfer

    bytes_per_token = PROFILES[settings.engine_model].kv_bytes_per_token
    return KvTransfer(
        clock=clock,
        release_kv=engine.release_kv,
        block_size=settings.block_size,
        seconds_per_token=bytes_per_token / (settings.kv_transfer_gb_per_s * 1e9),
        hold_seconds=settings.kv_hold_seconds,
    )


def _served(settings: EngineSimSettings, model: EngineModel) -> ServedModel:
    return ServedModel(
        name=settings.model,
        max_model_len=_max_model_len(settings.max_model_len, model),
        stream_interval=max(1, settings.stream_interval),
        api_key=settings.api_key,
        adapters=_adapters(settings),
    )


def _adapters(settings: EngineSimSettings) -> dict[str, str]:
    """Raises ValueError."""
    given = {name: path for name, equals, path in (text.partition("=") for text in settings.lora_modules) if equals}
    if len(given) < len(settings.lora_modules):
        raise ValueError(
            f"--lora-modules: each is NAME=PATH, and no name comes twice: {' '.join(settings.lora_modules)}"
        )
    return given


def _max_model_len(wanted: Tokens, model: EngineModel) -> Tokens:
    capacity = model.cache.blocks_max * model.settings.block_size
    if wanted > capacity:
        log.info("max_model_len_lowered", wanted=wanted, capacity=capacity)
    return min(wanted, capacity)
