"""Applies the engine's KV events to the session's translator; starts new sessions."""

import contextlib
from contextlib import aclosing
from dataclasses import dataclass
from typing import assert_never

import structlog

from pointsman.adapters.http_engine import EngineUnreachableError
from pointsman.adapters.kv_events.events import (
    EngineAttached,
    EngineBatch,
    EngineGap,
    EngineItem,
    EngineNoise,
    EngineReplayed,
    EngineRestarted,
    EngineResumed,
)
from pointsman.runtime import telemetry
from pointsman_worker.engine_monitor import EngineMonitor
from pointsman_worker.saved_session import SessionStore
from pointsman_worker.session import EventSource, SessionState

log = structlog.get_logger()


@dataclass(eq=False)
class Follower:
    state: SessionState
    monitor: EngineMonitor
    session_store: SessionStore

    async def run(self) -> None:
        """Raises SettingsError if the first engine cannot be followed."""
        state, monitor = self.state, self.monitor
        _show_zeros(*state.labels)
        events, facts = state.events, await monitor.facts()
        while events is None or not facts.completes:
            if events is not None:
                reason = "the engine makes vectors only: it is placed by load"
                log.info("cache_not_followed", reason=reason, model=facts.model)
            state.begin(facts, "no_events", None)
            facts = await monitor.next_engine()
        cursor = await self.session_store.load(facts)
        async with aclosing(events.items(cursor)) as items:
            async for item in items:
                await self._on_item(item, events)

    async def _on_item(self, item: EngineItem, events: EventSource) -> None:
        match item:
            case EngineResumed():
                with contextlib.suppress(EngineUnreachableError):
                    await self.monitor.refresh_load()
                self.session_store.resume()
            case EngineAttached() | EngineRestarted():
                self.session_store.discard()
                log.info("engine_followed", restarted=isinstance(item, EngineRestarted), exact=item.exact)
                facts, translator = await self.monitor.engine_to_follow()
                socket = "" if events.replays else ", and there is no replay socket"
                detail = "" if item.exact else f"the engine's first events may have been missed{socket}"
                self.state.begin(facts, "empty" if item.exact else "unknown", translator, detail=detail)
            case EngineBatch():
                self._on_batch(item)
            case EngineGap():
                telemetry.KV_EVENT_GAPS.labels(*self.state.labels, "lost").inc()
                self.state.on_events_lost(item.missed, item.reason)
            case EngineReplayed():
                telemetry.KV_EVENT_GAPS.labels(*self.state.labels, "replayed").inc()
                log.debug("engine_events_replayed", batches=item.recovered)
                self.state.wake.set()  # what was gathered meanwhile is the present now
            case EngineNoise():
                self._on_undecodable(1, item.reason)
            case _:
                assert_never(item)

    def _on_batch(self, batch: EngineBatch) -> None:
        state = self.state
        state.expire()
        if batch.timestamp > 0 and not state.catching_up:
            lag = max(0.0, state.unix_time() - batch.timestamp)
            telemetry.KV_EVENTS_LAG_SECONDS.labels(*state.labels).set(lag)
        _, translator = state.followed_session()
        counters, now = translator.device.counters, float(state.clock.wall())
        parked_before, mismatches_before = counters.parked_dropped, counters.mismatches
        for event in batch.events:
            telemetry.KV_EVENTS.labels(*state.labels, str(event.__struct_config__.tag)).inc()
        left_out = translator.apply_all(batch.events, now)
        if batch.unknown:
            telemetry.KV_EVENTS.labels(*state.labels, "unknown").inc(batch.unknown)
            log.debug("engine_event_unknown", sequence=batch.sequence, problem=batch.problem)
        if batch.undecodable:
            self._on_undecodable(batch.undecodable, batch.problem)
            state.on_events_lost(batch.undecodable, f"not understood: {batch.problem}"[:200])
        parked, lost = counters.parked_dropped - parked_before, counters.mismatches - mismatches_before + left_out
        if parked or lost:
            telemetry.KV_STORES_DROPPED.labels(*state.labels).inc(parked + lost)
        if state.followed_session()[0].exact:  # else blocks may well follow one that was stored before we came
            lost += parked
        if lost:
            reason = "one batch is more work than a batch may be" if left_out else counters.problem
            state.on_events_lost(lost, reason)
        state.check_capacity(translator)
        if translator.changed:
            state.wake.set()

    def _on_undecodable(self, count: int, problem: str) -> None:
        self.state.undecodable += count
        telemetry.KV_EVENTS_UNDECODABLE.labels(*self.state.labels).inc(count)
        log.warning("engine_event_undecodable", count=count, problem=problem[:200])


def _show_zeros(pool: str, engine: str) -> None:
    for metric in (
        telemetry.KV_EVENTS_UNDECODABLE,
        telemetry.KV_STORES_DROPPED,
        telemetry.KV_BLOCKS_EXPIRED,
        telemetry.KV_EVENT_GAPS,
    ):
        metric.show_zeros(pool=pool, engine=engine)
