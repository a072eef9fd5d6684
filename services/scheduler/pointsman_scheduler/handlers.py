"""Commands of the leader: publishes decisions and replies. Served only while this scheduler holds the lease; one that may
not decide answers only `cmd.fleet`, and senders retry the others. Only who may decide refuses what it cannot read: a
leader of a later release may be about to answer it."""

import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import (
    ApiKeyAnswered,
    CancelAnswered,
    CancelRequest,
    ChangeApiKey,
    Command,
    DescribeFleet,
    DescribeTenants,
    DrainAnswered,
    DrainInstance,
    FollowAnswered,
    FollowRequests,
    HandOverRequest,
    HeartbeatNoted,
    MigrateRequests,
    NoteHeartbeat,
    RouteRequest,
    SetTenantPolicies,
    UndrainInstance,
    refusal_of,
)
from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.permissions import ANY_INSTANCE
from pointsman.contracts.reasons import CancelCause, grant_unheard, recorded_cancel_cause
from pointsman.contracts.requests import RequestCancelled
from pointsman.contracts.subjects import (
    ANY_ACTOR,
    actor_of,
    admin_subject,
    command_subject,
    heartbeat_subject,
    instance_of,
)
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.scaling.roles import switch_refusal
from pointsman.ports import CommandHandler, Reply
from pointsman.primitives import EngineSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.admin_log import log_admin_action
from pointsman.state.workload import UNGRANTED
from pointsman_scheduler.api_keys import ApiKeyWriter, KeyRefusedError
from pointsman_scheduler.checkpoint_watch import CHECKPOINTS_PART
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.fleet_status import describe_fleet, drain_warning
from pointsman_scheduler.leader import ActiveTerm, Candidacy, send
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.overload import Overload
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.tenant_policies import TenantPoliciesKeeper
from pointsman_scheduler.work_budget import WorkBudget

DESCRIBING_SHARE, DESCRIBING_BURST_SECONDS = 0.1, 1.0
"""CPU seconds a second, and at once, for descriptions of tenants, which every reader may ask for: 30 ms each with 10,000
policies. Beyond that nobody is answered."""


class CommandHandlers:
    def __init__(
        self,
        context: SchedulerContext,
        leader: Candidacy,
        replica: Replica,
        tenants: TenantPoliciesKeeper,
        log_liveness: LogLiveness,
        overload: Overload,
    ) -> None:
        clock = context.clock
        self._context = context
        self._leader = leader
        self._log_liveness = log_liveness
        self._replica = replica
        self._tenants = tenants
        self._key_writer = ApiKeyWriter(context.link.access, clock, context.settings.secret)
        self._clock = clock
        self._decision_seconds = telemetry.DECISION_SECONDS.labels(context.pool)
        self._overload = overload
        self._describing = WorkBudget(clock, burst=DESCRIBING_BURST_SECONDS)

    def by_subject(self) -> list[tuple[str, CommandHandler]]:
        pool = self._context.pool
        return [
            (command_subject(pool, "route"), self._while_leading((RouteRequest,), self._route)),
            (command_subject(pool, "handover"), self._while_leading((HandOverRequest,), self._hand_over)),
            (command_subject(pool, "follow"), self._while_leading((FollowRequests,), self._follow)),
            (command_subject(pool, "cancel"), self._while_leading((CancelRequest,), self._cancel)),
            (command_subject(pool, "migrate"), self._while_leading((MigrateRequests,), self._migrate)),
            (
                admin_subject(pool, "drain", ANY_ACTOR),
                self._while_leading((DrainInstance, UndrainInstance), self._drain),
            ),
            (admin_subject(pool, "keys", ANY_ACTOR), self._while_leading((ChangeApiKey,), self._change_key)),
            (
                admin_subject(pool, "tenants", ANY_ACTOR),
                self._while_leading((SetTenantPolicies,), self._tenants.change),
            ),
            (heartbeat_subject(pool, ANY_INSTANCE), self._while_leading((NoteHeartbeat,), self._note_heartbeat)),
            (command_subject(pool, "fleet"), self._describe),
        ]

    def _while_leading(
        self, kinds: tuple[type[Command], ...], handle: Callable[[ActiveTerm, Any, Reply], Awaitable[None]]
    ) -> CommandHandler:
        async def on_command(command: AnyCommand, reply: Reply) -> None:
            await self._leader.settled()
            term = self._leader.leading
            if term is None:
                return
            if (refusal := refusal_of(command, kinds)) is not None:
                await reply(refusal)
            else:
                await handle(term, command, reply)

        return on_command

    async def _route(self, term: ActiveTerm, command: RouteRequest, reply: Reply) -> None:
        with term.spans.turn(command) if term.spans is not None else nullcontext():
            await self._place(term, command, reply)

    async def _place(self, term: ActiveTerm, command: RouteRequest, reply: Reply) -> None:
        if reason := self._overload.reason(command, self._replica.state.workload, reply.waited):
            await reply(self._overload.refusal(command, reason, term.term))
            return
        started = self._clock.wall()
        term.ownership.named(command.request, started)
        term.waiters.add(command, reply)
        now = self._clock.now()
        decided = term.dispatcher.route(term.clock_offsets.dated(command, now), now)
        self._decision_seconds.observe(float(self._clock.wall() - started))
        if not decided:
            self._abandon_lost_grant(term, command, now)
        await term.publish()
        if not decided:
            term.waiters.add(command, reply)  # again: giving the request up has forgotten it
            await send(term.waiters.answers_again(command))

    def _abandon_lost_grant(self, term: ActiveTerm, command: RouteRequest, now: EngineSeconds) -> None:
        """End a request granted to an instance that has left, if its ingress still asks: it never got the grant."""
        state = self._replica.state
        known = state.workload.requests.get(command.request)
        if known is not None and known.stage not in UNGRANTED and known.instance not in state.fleet:
            reason = grant_unheard(known.instance)
            term.dispatcher.cancel_any(known.id, CancelCause.GRANT_UNHEARD, now, reason=reason)

    async def _hand_over(self, term: ActiveTerm, command: HandOverRequest, reply: Reply) -> None:
        events = term.dispatcher.hand_over(command, self._clock.now())
        await term.publish()
        answer = term.waiters.hand_over_answer(command, events)
        if answer is not None:
            await reply(answer)

    async def _follow(self, term: ActiveTerm, command: FollowRequests, reply: Reply) -> None:
        term.ownership.followed(command, self._clock.wall())
        term.clock_offsets.note(command, self._clock.now())
        outliers = self._replica.state.outliers
        grants = [term.waiters.redispatched(sent) for sent in command.requests]
        given_up = [sent.request for sent in command.requests if outliers.is_idle_at(sent.request, sent.instance)]
        rebound = [grant for grant in grants if grant is not None]
        for sent in command.answered:
            term.dispatcher.note_first_token(sent, self._clock.now())
        if command.answered:
            await term.publish()
        await reply(FollowAnswered(rebound=rebound, given_up=given_up, term=term.term))

    async def _cancel(self, term: ActiveTerm, command: CancelRequest, reply: Reply) -> None:
        term.waiters.forget(command.request)
        cause = recorded_cancel_cause(command.reason)
        term.dispatcher.cancel_ungranted(command.request, cause, self._clock.now(), reason=command.reason)
        await term.publish()
        end = self._replica.state.workload.end_of(command.request)
        ended = end in (RequestCancelled.__name__, RequestRejected.__name__)
        await reply(CancelAnswered(request=command.request, ended=ended))

    async def _drain(self, term: ActiveTerm, command: DrainInstance | UndrainInstance, reply: Reply) -> None:
        now = self._clock.now()
        by = actor_of(reply.subject)
        events, answer = _decide_drain(term.dispatcher, command, now, by=by)
        if answer.draining and isinstance(command, DrainInstance) and not command.becomes:
            warning = drain_warning(term.dispatcher.state, command.instance, self._context.policies.hold_seconds)
            answer = msgspec.structs.replace(answer, warning=warning)
        action = "drain" if isinstance(command, DrainInstance) else "undrain"
        log_admin_action(action, by, answer.refusal, instance=command.instance, changed=bool(events))
        term.dispatcher.place_held(now)
        await term.publish()
        await reply(answer)

    async def _change_key(self, term: ActiveTerm, command: ChangeApiKey, reply: Reply) -> None:
        """Serves until the write is confirmed; the term may end meanwhile, and the log then lacks the event."""
        by, key, refusal = actor_of(reply.subject), None, ""
        try:
            key = await self._key_writer.change(command, by)
        except KeyRefusedError as error:
            refusal = str(error)
        log_admin_action(
            f"key_{command.action}", by, refusal, key=command.key.id, tenant=command.key.tenant, changed=key is not None
        )
        if key is not None and self._leader.leading is term:
            term.dispatcher.record_key(key.id, key.tenant, command.action, self._clock.now(), by=by)
            await term.publish()
        await reply(ApiKeyAnswered(refusal=refusal))

    async def _migrate(self, term: ActiveTerm, command: MigrateRequests, reply: Reply) -> None:
        answer = term.migrations.take(command, self._clock.now(), log_busy=self._overload.log_busy)
        await term.publish()
        await reply(answer)

    async def _note_heartbeat(self, term: ActiveTerm, command: NoteHeartbeat, reply: Reply) -> None:
        report = command.report
        if instance_of(reply.subject) != report.instance:
            return
        self._log_liveness.heartbeat()
        known = self._replica.state.fleet.get(report.instance)
        if known is not None and known.epoch > report.epoch:  # nothing of it counts, unless the newer epoch is silent
            await reply(HeartbeatNoted(log=known.suspected, replaced_by=known.url))
            return
        log = term.heard.note(self._replica.state, report, self._clock.now())
        await reply(HeartbeatNoted(log=log, flush=term.flush_pace.seconds(self._clock.wall())))

    async def _describe(self, command: AnyCommand, reply: Reply) -> None:
        if isinstance(command, DescribeFleet):
            context, state, unconfirmed = self._context, self._replica.state, self._overload.unconfirmed
            await reply(
                describe_fleet(
                    state,
                    context.policies,
                    unconfirmed,
                    pool=context.pool,
                    scheduler=context.name,
                    checkpoints_overdue=context.board.degraded_parts.get(CHECKPOINTS_PART, ""),
                )
            )
        elif isinstance(command, DescribeTenants):
            if not self._describing.wait_seconds(DESCRIBING_SHARE):
                began = time.thread_time()
                await reply(self._tenants.described(self._context.pool))
                self._describing.spend(time.thread_time() - began)
        elif self._leader.leading is not None and (refusal := refusal_of(command, (DescribeFleet, DescribeTenants))):
            await reply(refusal)


def _decide_drain(
    dispatcher: Dispatcher, command: DrainInstance | UndrainInstance, now: EngineSeconds, *, by: str
) -> tuple[list[LogEvent], DrainAnswered]:
    fleet = dispatcher.state.fleet
    if command.instance not in fleet:
        known = ", ".join(sorted(instance.id for instance in fleet.instances)) or "none"
        refusal = f"there is no instance {command.instance}; there are: {known}"
        return [], DrainAnswered(instance=command.instance, draining=False, refusal=refusal)
    if isinstance(command, DrainInstance):
        if refusal := switch_refusal(fleet, command.instance, command.becomes):
            return [], DrainAnswered(instance=command.instance, draining=False, refusal=refusal)
        events = dispatcher.drain(
            command.instance, command.reason, now, leaving=command.leaving, by=by, becomes=command.becomes
        )
    else:
        events = dispatcher.undrain(command.instance, now, by=by)
    queue = dispatcher.state.workload.queues.get(command.instance)
    answer = DrainAnswered(
        instance=command.instance,
        draining=fleet[command.instance].draining,
        requests=queue.requests if queue else 0,
    )
    return events, answer
