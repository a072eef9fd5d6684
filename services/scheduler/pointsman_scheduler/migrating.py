"""Handles plans of rebalancers. A plan counts if it is of this term and missed at most PLAN_BEHIND_EVENTS_MAX entries;
each move is decided on the newer State. A repeated plan gets the first answer again."""

from collections import OrderedDict

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import MigrateRequests, MigrationAnswered, MoveAnswered
from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.contracts.reasons import PlanRefusal
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.rebalancing import Migration, MigrationPlan
from pointsman.primitives import EngineSeconds
from pointsman.runtime import telemetry

log = structlog.get_logger()

PLAN_BEHIND_EVENTS_MAX = 1000
PLAN_MOVES_MAX = 256
"""Bounds the delay of requests that arrive meanwhile."""
PLANS_REMEMBERED_MAX = 256


class MigrationHandler:
    def __init__(self, dispatcher: Dispatcher, pool: str) -> None:
        self._pool = pool
        for metric in (
            telemetry.MIGRATIONS,
            telemetry.REDISPATCHES_ORDERED,
            telemetry.REDISPATCH_WASTED_PREFILL_SECONDS,
        ):
            metric.show_zeros(pool=pool)
        self._dispatcher = dispatcher
        self._answered: OrderedDict[str, MigrationAnswered] = OrderedDict()

    def take(self, command: MigrateRequests, now: EngineSeconds, *, log_busy: bool = False) -> MigrationAnswered:
        known = self._answered.get(command.plan)
        if known is not None:
            return known
        refusal, detail = self._refusal(command, log_busy=log_busy)
        if refusal:
            log.warning("migration_plan_rejected", plan=command.plan, reason=refusal, detail=detail)
            return self._answer(command, refusal=refusal, detail=detail)
        events = self._dispatcher.migrate(_plan_of(command), now)
        answer = self._answer(command, moves=_outcomes(events))
        self._remember(answer)
        for move in answer.moves:
            telemetry.MIGRATIONS.labels(self._pool, move.refusal or "applied").inc()
        for event in events:
            if isinstance(event, RequestMigrated) and event.rebound:
                telemetry.REDISPATCHES_ORDERED.labels(self._pool).inc()
                telemetry.REDISPATCH_WASTED_PREFILL_SECONDS.labels(self._pool).inc(event.wasted)
        return answer

    def _refusal(self, command: MigrateRequests, *, log_busy: bool) -> tuple[str, str]:
        term, as_of = self._dispatcher.term, self._dispatcher.state.sequence
        if command.term != term:
            return PlanRefusal.OTHER_TERM.value, f"it was made in term {command.term}, this is term {term}"
        if as_of - command.as_of > PLAN_BEHIND_EVENTS_MAX:
            return PlanRefusal.TOO_OLD.value, f"it knew the log up to {command.as_of}, this is {as_of}"
        if len(command.moves) > PLAN_MOVES_MAX:
            return PlanRefusal.TOO_LONG.value, f"{len(command.moves)} moves are more than {PLAN_MOVES_MAX}"
        if log_busy:
            return PlanRefusal.LOG_BUSY.value, "the log does not keep up, and moves are decisions too"
        return "", ""

    def _answer(
        self,
        command: MigrateRequests,
        *,
        moves: list[MoveAnswered] | None = None,
        refusal: str = "",
        detail: str = "",
    ) -> MigrationAnswered:
        dispatcher = self._dispatcher
        return MigrationAnswered(
            plan=command.plan,
            term=dispatcher.term,
            as_of=dispatcher.state.sequence,
            decided=dispatcher.decided,
            moves=moves or [],
            refusal=refusal,
            detail=detail,
        )

    def _remember(self, answer: MigrationAnswered) -> None:
        self._answered[answer.plan] = answer
        if len(self._answered) > PLANS_REMEMBERED_MAX:
            self._answered.popitem(last=False)


def _plan_of(command: MigrateRequests) -> MigrationPlan:
    moves = tuple(Migration(m.request, m.source, m.target, m.benefit, m.reason, m.rebind) for m in command.moves)
    return MigrationPlan(command.as_of, moves, command.plan, command.policy)


def _outcomes(events: list[LogEvent]) -> list[MoveAnswered]:
    outcomes = []
    for event in events:
        if isinstance(event, RequestMigrated):
            outcomes.append(MoveAnswered(request=event.request))
        elif isinstance(event, MigrationRefused):
            outcomes.append(MoveAnswered(request=event.request, refusal=event.reason))
    return outcomes
