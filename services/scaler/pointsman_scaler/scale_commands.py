"""Answers `cmd.scale`. In: ScalePool of operators, and of scalers whose `/desired` is read. Out: a decision in the log or
a refusal, and what is wanted, there, and missing. A scaler without the lease does not answer."""

from collections.abc import Callable

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import ScaleAnswered, ScalePool, refusal_of
from pointsman.contracts.subjects import actor_of
from pointsman.policies.scaling.decider import wanted_roles
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, drained_by_operators, fixed_sizes
from pointsman.ports import Reply
from pointsman.primitives import EngineSeconds
from pointsman.runtime.admin_log import log_admin_action
from pointsman.runtime.leadership import Leadership
from pointsman.state.state import State
from pointsman_scaler.decision_log import DecisionLog
from pointsman_scaler.wanted_size import WantedSize


class ScaleCommands:
    def __init__(
        self, size: WantedSize, decisions: DecisionLog, leadership: Leadership, now: Callable[[], EngineSeconds]
    ) -> None:
        self._size = size
        self._decisions = decisions
        self._leadership = leadership
        self._now = now

    async def on_scale(self, command: AnyCommand, reply: Reply) -> None:
        if not self._leadership.holds:
            return
        if not isinstance(command, ScalePool):
            if (unread := refusal_of(command, (ScalePool,))) is not None:
                await reply(unread)
            return
        if command.size_read:
            self._size.page.note_read()
        refusal = ""
        roles, wanted = RoleSizes(command.prefill or 0, command.decode or 0), command.wanted
        if roles.total:
            wanted = roles.total
        if wanted is not None:
            actor = actor_of(reply.subject)
            refusal = (
                self._size.decider.size_refusal(self._size.state, wanted)
                or role_refusal(self._size.state, roles)
                or self._size_refusal(wanted)
                or await self._decide(wanted, roles, command.asker, actor)
            )
            log_admin_action("scale", actor, refusal, wanted=wanted, prefill=roles.prefill, decode=roles.decode)
        await reply(self._answer(refusal))

    def _size_refusal(self, wanted: int) -> str:
        by_hand = self._size.by_hand(wanted)
        return by_hand and f"{by_hand}, or run the scaler with a provider that does (pointsman up --instances MIN..MAX)"

    async def _decide(self, wanted: int, roles: RoleSizes, asker: str, actor: str) -> str:
        """Returns why it was not decided, or "". A repeated request is decided once."""
        state = self._size.state
        if wanted == state.scaling.wanted and roles in (NOT_SIZED, wanted_roles(state)):
            return ""
        decision = self._size.decider.operator_decision(
            state, wanted, asker=asker, actor=actor, now=self._now(), roles=roles
        )
        if not await self._decisions.write(decision):
            return "the log does not take it in at the moment; ask again"
        if state.scaling.wanted != wanted or (roles.total and wanted_roles(state) != roles):
            return f"{state.scaling.wanted} was decided at the same moment; ask again"
        return ""

    def _answer(self, refusal: str) -> ScaleAnswered:
        size, decider, runner = self._size, self._size.decider, self._size.runner
        scaling, status, wanted, roles = size.state.scaling, runner.status, size.total, size.roles
        return ScaleAnswered(
            number=scaling.number,
            wanted=wanted or 0,
            ready=status.in_service if status else 0,
            coming=len(status.coming) if status else 0,
            leaving=len(status.leaving) if status else 0,
            applied=size.is_applied,
            policy=decider.policy.name,
            provider=runner.provider.name,
            lowest=decider.limits.lowest,
            highest=decider.limits.highest,
            reason=size.reason,
            trouble=size.trouble,
            refusal=refusal,
            prefill=roles.prefill,
            decode=roles.decode,
            switching=status.switching if status else 0,
            by_hand="" if wanted is None else size.by_hand(wanted),
            drained=[instance.id for instance in drained_by_operators(size.state.fleet)],
        )


def role_refusal(state: State, roles: RoleSizes) -> str:
    """Why the pool cannot have these roles, or ""."""
    fixed = fixed_sizes(state.fleet)
    if not roles.total:
        return ""
    if not roles.prefill or not roles.decode:
        return "each role needs at least one instance"
    if any(i.role == "both" and not i.role_switching for i in state.fleet.instances):
        return "instances that prefill and decode cannot change their role: start workers with --role-switching"
    if fixed.prefill > roles.prefill or fixed.decode > roles.decode:
        return f"{fixed.prefill} prefill and {fixed.decode} decode instances cannot change their role"
    return ""
