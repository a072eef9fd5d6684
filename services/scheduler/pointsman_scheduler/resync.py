"""Requests snapshots or rejoins from workers whose cache index is unverified. At most AT_ONCE_MAX are asked at once, so
that workers that hang delay no other; who did not answer is asked again after a wait that doubles."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.commands import ResyncCache
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.subjects import resync_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import Epoch, InstanceId, PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import contained
from pointsman.state.state import State
from pointsman_scheduler.leader import Candidacy
from pointsman_scheduler.replica import Replica

log = structlog.get_logger()

PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
TIMEOUT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
RETRY_WALL_SECONDS_MAX: WallSeconds = WallSeconds(5.0)
AT_ONCE_MAX = 32


@dataclass(frozen=True, slots=True)
class _Question:
    """`distrust`: epoch in which the engine contradicted its own events. `reported`: of an unregistered instance, which
    alone is asked: another worker may have its name."""

    instance: InstanceId
    reason: str
    rejoin: bool = False
    distrust: Epoch | None = None
    reported: Epoch | None = None


class _Unanswered:
    def __init__(self) -> None:
        self._backoff = Backoff(PERIOD_WALL_SECONDS, RETRY_WALL_SECONDS_MAX)
        self.again_at = WallSeconds(0.0)

    def note(self, now: WallSeconds) -> None:
        self.again_at = now + self._backoff.next_wait()


class Resync:
    def __init__(
        self,
        *,
        leader: Candidacy,
        replica: Replica,
        commands: Commands,
        clock: Clock,
        pool: PoolName,
        is_refused: Callable[[InstanceId, Epoch], bool],
    ) -> None:
        self._is_refused = is_refused
        self._leader = leader
        self._replica = replica
        self._commands = commands
        self._clock = clock
        self._pool = pool
        self._reported: dict[InstanceId, Epoch] = {}
        """Instances that are to join, by `_is_to_join`, and reported since they were asked to."""
        self._unanswered: dict[InstanceId, _Unanswered] = {}

    def note_report(self, report: InstanceReported) -> None:
        """Of the log, once it is applied."""
        is_to_join = _is_to_join(self._replica.state, report.instance, report.epoch)
        if is_to_join and not self._is_refused(report.instance, report.epoch):
            self._reported[report.instance] = report.epoch

    async def run(self) -> None:
        while True:
            await self._clock.sleep_wall(PERIOD_WALL_SECONDS)
            with contained("resync"):
                if self._leader.leading is not None:
                    await self._resync_doubtful(self._replica.state)

    async def _resync_doubtful(self, state: State) -> None:
        questions = {question.instance: question for question in (*_of_fleet(state), *self._of_unregistered(state))}
        self._forget_others(state, questions)
        at_once = asyncio.Semaphore(AT_ONCE_MAX)
        await asyncio.gather(
            *(self._ask(question, at_once) for question in questions.values() if self._is_due(question))
        )

    def _of_unregistered(self, state: State) -> Iterator[_Question]:
        reason = "it reports, but the log does not say that it joined"
        for instance, epoch in self._reported.items():
            if _is_to_join(state, instance, epoch):
                yield _Question(instance, reason, rejoin=True, reported=epoch)

    def _forget_others(self, state: State, questions: dict[InstanceId, _Question]) -> None:
        for name in [name for name, epoch in self._reported.items() if not _is_to_join(state, name, epoch)]:
            del self._reported[name]
        for name in self._unanswered.keys() - questions.keys() - state.unregistered.keys():
            del self._unanswered[name]

    def _is_due(self, question: _Question) -> bool:
        unanswered = self._unanswered.get(question.instance)
        return unanswered is None or unanswered.again_at <= self._clock.wall()

    async def _ask(self, question: _Question, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            with contained("resync"):
                await self._request(question)

    async def _request(self, question: _Question) -> None:
        instance, distrust = question.instance, question.distrust
        if question.reported is not None:
            self._reported.pop(instance, None)
        telemetry.CACHE_RESYNCS.labels(self._pool, instance).inc()
        log.info("resync", instance=instance, doubt=question.reason, rejoin=question.rejoin, distrust=distrust)
        newest = self._replica.state.newest_epoch(instance) if question.rejoin else distrust or Epoch(0)
        command = ResyncCache(
            instance=instance,
            reason=question.reason,
            rejoin=question.rejoin,
            above=max(Epoch(0), newest),
            distrust=distrust is not None,
            epoch=question.reported or Epoch(0),
        )
        try:
            await self._commands.request(resync_subject(self._pool, instance), command, timeout=TIMEOUT_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError) as error:
            log.warning("resync_unanswered", instance=instance, problem=str(error))
            self._unanswered.setdefault(instance, _Unanswered()).note(self._clock.wall())
        else:
            self._unanswered.pop(instance, None)


def _is_to_join(state: State, instance: InstanceId, epoch: Epoch) -> bool:
    """It reports and has not joined, or while a newer epoch is silent: a worker that started anew with its clock set back."""
    known = state.fleet.get(instance)
    return instance in state.unregistered or (known is not None and known.suspected and epoch < known.epoch)


def _of_fleet(state: State) -> Iterator[_Question]:
    for instance in state.fleet.instances:
        if instance.forged:
            yield _Question(instance.id, instance.doubt, rejoin=True)
        elif instance.contradicted:
            yield _Question(instance.id, instance.contradicted, distrust=instance.epoch)
        elif instance.doubt:
            yield _Question(instance.id, instance.doubt)
