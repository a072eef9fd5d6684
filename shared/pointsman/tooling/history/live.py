"""The log of a running fleet, read from JetStream up to what is its end now.

Readers here are plain iterators, and the log's reader is asynchronous: each reading has an event loop of its own, which
runs while a batch is fetched and rests while the batch is folded. The adapter survives that: it reads by sequence.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack, closing
from functools import cached_property

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.checkpoint_proof import checkpoint_form, entry_digest
from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_link import Link, open_link
from pointsman.chassis.settings import FleetSettings
from pointsman.contracts.decisions import LeaderElected, RequestPlaced, RequestRejected
from pointsman.policies.dispatch import PolicySet, UnknownPolicyError, policy_set, recorded_policy_set
from pointsman.ports import (
    CheckpointLabel,
    LogEntry,
    LogExtent,
    LogMissingError,
    LogReset,
    LogUnavailableError,
    StoreUnavailableError,
)
from pointsman.primitives import Sequence
from pointsman.simulation.replay import Known
from pointsman.state.checkpoint import UnreadableStateError, decode_state
from pointsman.state.state import State
from pointsman.tooling.history.entries import Header, History
from pointsman.tooling.history.errors import HistoryError

CONNECT_SECONDS_MAX = 5.0
CONNECT_POLL_SECONDS = 0.05
BATCH_ENTRIES = 1000
SILENCE_SECONDS_MAX = 10.0
"""How long the next entry may take to come before the reading is given up."""


class LiveHistory(History):
    """The stream of one pool. Opening it looks once for its extent; raises HistoryError."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.origin = f"the log of pool '{settings.pool}' at {settings.nats_shown}"
        with asyncio.Runner() as runner:
            extent = runner.run(self._extent())
        self.header = Header(
            pool=settings.pool,
            identity=extent.identity,
            first=extent.first,
            last=extent.last,
            entries=max(0, extent.last - extent.first + 1),
        )

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        header = self.header
        if not header.entries:
            return
        with asyncio.Runner() as runner:
            batches = _batches(self._settings, self.origin, max(start, header.first), header.last)
            try:
                while batch := runner.run(anext(batches, [])):
                    yield from batch
            finally:
                runner.run(batches.aclose())

    @override
    @cached_property
    def known(self) -> Known | None:
        """From the oldest checkpoint that can be proven to be of this log and of this version's fold."""
        if self.header.first <= 1:
            return None
        with asyncio.Runner() as runner:
            kept = runner.run(self._checkpoints())
        proven = (self._proven(label, content) for label, content in kept)
        return next((known for known in proven if known is not None), None)

    def _proven(self, label: CheckpointLabel, content: bytes) -> Known | None:
        with closing(self.entries(label.as_of)) as entries:
            entry = next(entries, None)
            if entry is None or entry.sequence != label.as_of or entry_digest(entry) != label.entry:
                return None
            try:
                state = decode_state(content)
                policies = _policies_in(entries)
            except (UnreadableStateError, UnknownPolicyError):
                return None
        same_fold = checkpoint_form(State(state.settings, policies.memories())) == label.form
        return Known(state, policies) if same_fold else None

    async def _checkpoints(self) -> list[tuple[CheckpointLabel, bytes]]:
        """Those of entries that the log still has, the oldest first. Raises HistoryError."""
        header = self.header
        async with AsyncExitStack() as stack:
            store = (await _linked(stack, self._settings)).checkpoints
            try:
                fitting = [
                    label
                    for label in await store.labels()
                    if label.identity == header.identity and header.first <= label.as_of <= header.last
                ]
                loaded = [(label, await store.load(label)) for label in reversed(fitting)]
            except StoreUnavailableError as error:
                msg = f"the checkpoints of {self.origin} cannot be read: {error}"
                raise HistoryError(msg) from error
        return [(label, content) for label, content in loaded if content is not None]

    async def _extent(self) -> LogExtent:
        async with AsyncExitStack() as stack:
            link = await _linked(stack, self._settings)
            try:
                return await link.log.extent()
            except LogMissingError as error:
                msg = f"{self.origin} is not there; `pointsman fleet` says which pool a running fleet serves"
                raise HistoryError(msg) from error
            except LogUnavailableError as error:
                raise _no_log(self.origin, error) from error


def _policies_in(entries: Iterator[LogEntry]) -> PolicySet:
    """Those that the next decision on a placement names; where there is none, the default ones. Raises
    UnknownPolicyError."""
    for entry in entries:
        if isinstance(entry.event, LeaderElected | RequestPlaced | RequestRejected):
            return recorded_policy_set(entry.event.policy, entry.event.settings)
    return policy_set()


async def _batches(
    settings: FleetSettings, origin: str, first: Sequence, last: Sequence
) -> AsyncGenerator[list[LogEntry], None]:
    async with AsyncExitStack() as stack:
        link = await _linked(stack, settings)
        reading = link.log.read(first)
        batch: list[LogEntry] = []
        following = first
        while following <= last:
            entry = await _next(reading, origin)
            if entry.sequence < following:
                continue
            batch.append(entry)
            following = entry.sequence + 1
            if len(batch) == BATCH_ENTRIES:
                yield batch
                batch = []
        if batch:
            yield batch


async def _next(reading: AsyncIterator[LogEntry | LogReset], origin: str) -> LogEntry:
    try:
        async with asyncio.timeout(SILENCE_SECONDS_MAX):
            entry = await anext(reading)
    except (TimeoutError, LogMissingError, LogUnavailableError) as error:
        raise _no_log(origin, error) from error
    if isinstance(entry, LogReset):
        msg = f"{origin} changed while it was read: {entry.reason}; read it again, or from the recorder's archive"
        raise HistoryError(msg)
    return entry


async def _linked(stack: AsyncExitStack, settings: FleetSettings) -> Link:
    link = await stack.enter_async_context(
        open_link(settings, ScaledClock(settings.speed), HealthBoard(), name="history", only_reads=True)
    )
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while not link.commands.connected:
        if time.monotonic() > deadline:
            msg = f"no nats-server answers at {settings.nats_shown}; say where the log is with --from, --nats or --data"
            raise HistoryError(msg)
        await asyncio.sleep(CONNECT_POLL_SECONDS)
    return link


def _no_log(origin: str, error: Exception) -> HistoryError:
    reason = str(error) or f"it says nothing for {SILENCE_SECONDS_MAX:g} s"
    return HistoryError(f"{origin} cannot be read: {reason}")
