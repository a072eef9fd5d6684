"""The fleet in virtual time: production State, Dispatcher and engine model under a virtual clock. In: a `Scenario` and
requests in order of arrival. Out: an `Outcome`. Deterministic: equal scenarios and requests give equal outcomes."""

import sys
import time
from collections.abc import Generator, Sequence

import msgspec

from pointsman.contracts.block_keys import pack_keys, unpack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest, RouteRequest
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.requests import PrefillFinished, PrefixFetchEnded, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, SessionId, Tenant, Tokens
from pointsman.simulation.engine_types import HashedPrompt, PrefillEnded, StepResult
from pointsman.simulation.event_queue import EventQueue
from pointsman.simulation.outcome import LoadSample, Outcome, RequestRow
from pointsman.simulation.scenario import NO_MIRROR, Failure, FleetMirror, Scenario
from pointsman.simulation.simulated_fleet import SimulatedEngine, SimulatedFleet
from pointsman.simulation.simulated_pool import SimulatedPool
from pointsman.simulation.simulated_scaler import TICK_SECONDS, SimulatedScaler
from pointsman.simulation.simulated_transfers import SimulatedTransfers
from pointsman.simulation.workload import WorkloadRequest

__all__ = ["Failure", "FleetMirror", "Scenario", "Simulation", "simulate", "simulate_in_slices"]

SAMPLE_SECONDS = 1.0
REBALANCE_SECONDS = 0.25
REPORT_SECONDS = 1.0
RETRIES_MAX = 2
FUSED_STEPS_MAX = 512
SLICED_DAYS_MAX = 31
"""There is a sample of each second: a log with one wrong date would fill the memory."""


def simulate(scenario: Scenario, requests: Sequence[WorkloadRequest], *, mirror: FleetMirror = NO_MIRROR) -> Outcome:
    """Run until all requests have ended or nothing more can happen; requests waiting for an instance that never returns
    stay `unfinished`."""
    return Simulation(scenario, requests, mirror).run()


def simulate_in_slices(
    scenario: Scenario, requests: Sequence[WorkloadRequest], *, mirror: FleetMirror = NO_MIRROR, events: int
) -> Generator[float, None, Outcome]:
    """As `simulate`; yields the share of requests that ended, after each so many events."""
    return (yield from Simulation(scenario, requests, mirror).slices(events))


class Simulation:
    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[WorkloadRequest],
        mirror: FleetMirror = NO_MIRROR,
        agenda: EventQueue | None = None,
    ) -> None:
        self.unfinished = len(requests)
        self._scenario = scenario
        self._splits = scenario.splits
        self._requests = requests
        self.outcome = Outcome([scenario.row(number, request) for number, request in enumerate(requests)])
        self._agenda = agenda or EventQueue()
        self.pool = SimulatedPool(scenario, mirror, self._agenda, self.outcome)
        self.state = self.pool.state
        self.fleet = SimulatedFleet(self.pool, carry_out=self.carry_out, lose=self._lose)
        self._transfers = SimulatedTransfers(self.pool, self.fleet, next_step=self._next_step, fetched=self._fetched)
        self._dispatcher = self.pool.dispatcher
        self._rebalancing = REBALANCING_POLICIES[scenario.rebalancing]()
        self._commands: dict[RequestId, RouteRequest] = {}
        self._scaler = SimulatedScaler(self.pool) if scenario.role_switching else None
        self._gaps_before: dict[RequestId, int] = {}

    def run(self) -> Outcome:
        for _ in self.slices(sys.maxsize):
            pass
        return self.outcome

    def slices(self, events: int) -> Generator[float, None, Outcome]:
        """Runs in slices of so many events; yields the share of requests that ended. Raises ValueError beyond
        SLICED_DAYS_MAX."""
        self._prepare()
        while self.unfinished and not self._agenda.run(events):
            if self._agenda.now > SLICED_DAYS_MAX * 86_400:
                raise ValueError(f"they take more than {SLICED_DAYS_MAX} days")
            yield 1 - self.unfinished / len(self._requests)
        self.outcome.virtual_seconds = self._agenda.now
        return self.outcome

    def _prepare(self) -> None:
        scenario, agenda, fleet = self._scenario, self._agenda, self.fleet
        for number in range(scenario.instances):
            fleet.join(number, 0.0)
        self.pool.catch_up(scenario.load_lag_s)
        for at, policies in scenario.tenant_policies:
            agenda.at(at, lambda now, p=policies: self._set_policies(p, now))  # type: ignore[misc]
        for number, request in enumerate(self._requests):
            agenda.at(request.arrival_s, lambda now, n=number: self._arrive(n, now))  # type: ignore[misc]
        for failure in scenario.failures:
            agenda.at(failure.at, lambda now, f=failure: self._fail_engine(f, now))  # type: ignore[misc]
        for at, wanted in scenario.scale_at:
            agenda.at(at, lambda now, w=wanted: fleet.scale(w, now))  # type: ignore[misc]
        agenda.every(SAMPLE_SECONDS, self._sample, first=0.0)
        if scenario.rebalancing != "off":
            agenda.every(REBALANCE_SECONDS, self._rebalance, first=REBALANCE_SECONDS)
        if self._scaler is not None:
            agenda.every(TICK_SECONDS, self._scale, first=0.0)
        if scenario.event_loss > 0:
            agenda.every(REPORT_SECONDS, fleet.report, first=REPORT_SECONDS)

    def carry_out(self, events: list[LogEvent], now: EngineSeconds) -> None:
        """Effects of decisions on engines and rows; the state has them already."""
        for event in events:
            if self.pool.lags:
                self.pool.show_later(event, now)
            match event:
                case RequestPlaced():
                    row = self._row(event.request)
                    row.instance, row.best_effort = event.instance, event.best_effort
                    row.predicted_ttft = now - row.arrived_at + event.predicted_ttft
                    row.predicted_ttft_upper = now - row.arrived_at + event.predicted_ttft_upper
                    row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                case RequestMigrated():
                    row = self._row(event.request)
                    row.instance = event.instance
                    row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                    row.migrations += 1
                    self.outcome.migrations += 1
                case RequestGranted():
                    self._row(event.request).granted_at = now
                    if event.fetch_from:
                        self._transfers.fetch(event, self._commands[event.request], now)
                    else:
                        self._send(event.request, event.instance, now)
                case RequestHandedOver():
                    self._fetch(event, now)
                case HandOverRefused():
                    self.fleet.engines[event.source].model.release_kv(event.request)
                    self._fail(event.request, event.source, event.reason, now, status=429, end="rejected")
                case RequestRejected():
                    row = self._row(event.request)
                    uncached = min((c.uncached_tokens for c in event.candidates), default=row.prompt_tokens)
                    row.predicted_cached_tokens = row.prompt_tokens - uncached
                    self._end(event.request, now, "rejected", event.reason)
                case _:
                    pass

    def _set_policies(self, policies: TenantPolicies, now: EngineSeconds) -> None:
        self.carry_out(self._dispatcher.set_tenant_policies(policies, now, by="simulation"), now)

    def _arrive(self, number: int, now: EngineSeconds) -> None:
        scenario, request = self._scenario, self._requests[number]
        command = RouteRequest(
            request=RequestId(str(number)),
            ingress="",
            arrived_at=now,
            tenant=Tenant(request.tenant),
            session=SessionId(request.session),
            keys=pack_keys(self.pool.mirror.keys_of(request, scenario.block_tokens)),
            prompt_tokens=request.input_length,
            max_output_tokens=scenario.max_output_tokens(request),
            slo_ttft=scenario.slo_ttft(request),
            slo_tpot=request.slo_tpot_s,
            priority=request.priority,
        )
        self._route(command, now)

    def _route(self, command: RouteRequest, now: EngineSeconds) -> None:
        self._commands[command.request] = command
        self.pool.catch_up(now)
        started = time.process_time()
        events = self._dispatcher.route(command, now)
        self.outcome.decision_seconds += time.process_time() - started
        self.outcome.decisions += 1
        self.carry_out(events, now)
        placed = self.state.workload.requests.get(command.request)
        if placed is not None and placed.instance not in self.state.fleet.ready:  # placed by a view that lags behind
            self.carry_out(self._dispatcher.relocate_pending(now), now)

    def _send(self, request_id: RequestId, instance: InstanceId, now: EngineSeconds) -> None:
        way_of = self.pool.mirror.way_of
        way = way_of(self._requests[int(request_id)]) if way_of else 0.0
        if not way:
            self._submit(request_id, instance, now)
            return

        def start(at: EngineSeconds) -> None:
            request = self.state.workload.requests.get(request_id)
            if request is not None and request.instance == instance and request.granted_at == now:
                self._submit(request_id, instance, at)

        self._agenda.at(now + way, start)

    def _submit(self, request_id: RequestId, instance: InstanceId, now: EngineSeconds, *, received: Tokens = 0) -> None:
        engine = self.fleet.engines[instance]
        if not engine.alive:
            # Connection refused: the ingress asks again once this decision is carried out.
            self._agenda.at(now, lambda at: self._lose(request_id, engine, at, True))
            return
        hands_over = self._hands_over(request_id)
        tokens = 1 if hands_over else self._row(request_id).output_tokens
        prompt = self._prompt(request_id)
        engine.model.submit(request_id, prompt, max_tokens=tokens, now=now, held=hands_over, received=received)
        self._next_step(engine, now)

    def _fetched(self, grant: RequestGranted, event: PrefixFetchEnded, now: EngineSeconds) -> None:
        self.outcome.note_fetch(event)
        self._row(event.request).fetched_tokens = 0 if event.failure else grant.fetched_tokens
        received = event.tokens if self._scenario.fetch_path == "direct" else 0
        self._submit(event.request, event.instance, now, received=received)
        self.carry_out(self._dispatcher.grant_waiting(event.instance, now), now)

    def _fail_engine(self, failure: Failure, now: EngineSeconds) -> None:
        engine = self.fleet.fail(failure, now)
        self._transfers.failed(engine, now)

    def _prompt(self, request_id: RequestId) -> HashedPrompt:
        command = self._commands[request_id]
        return HashedPrompt(command.prompt_tokens, unpack_keys(command.keys))

    def _hands_over(self, request_id: RequestId) -> bool:
        return self._splits and bool(self.state.workload.requests[request_id].decode)

    def _fetch(self, event: RequestHandedOver, now: EngineSeconds) -> None:
        """Decoding begins when the KV cache has been transferred."""
        source, target = self.fleet.engines[event.source], self.fleet.engines[event.instance]
        prompt = self._prompt(event.request)
        missing = max(0, prompt.length - target.model.cached_tokens(prompt))

        def start(at: EngineSeconds) -> None:
            source.model.release_kv(event.request)
            request = self.state.workload.requests.get(event.request)
            if request is None or request.attempt != event.attempt or request.instance != event.instance:
                return
            if not (source.alive and target.alive):
                self._lose(event.request, target, at, True)
                return
            row = self._row(event.request)
            row.instance = target.id
            target.model.submit(request.id, prompt, max_tokens=row.output_tokens, now=at, received=prompt.length)
            self._next_step(target, at)

        self._agenda.at(now + missing / self.pool.transfer_tokens_per_s, start)

    def _lose(self, request_id: RequestId, engine: SimulatedEngine, now: EngineSeconds, retry: bool) -> None:
        row, command = self._row(request_id), self._commands[request_id]
        if retry and row.retries < RETRIES_MAX:
            row.retries += 1
            excluded = [*command.excluded, engine.id]
            self._route(msgspec.structs.replace(command, attempt=command.attempt + 1, excluded=excluded), now)
            return
        self._fail(request_id, engine.id, "engine_failed", now, status=502, end="failed")

    def _fail(
        self, request_id: RequestId, instance: InstanceId, reason: str, now: EngineSeconds, *, status: int, end: str
    ) -> None:
        event = RequestFailed(at=now, request=request_id, reason=reason, status=status, instance=instance)
        self.pool.apply(event, now)
        self._end(request_id, now, end, reason)

    def _end(self, request_id: RequestId, now: EngineSeconds, end: str, reason: str = "") -> None:
        row = self._row(request_id)
        row.end, row.reason, row.ended_at = end, reason, now  # type: ignore[assignment]
        self._commands.pop(request_id, None)
        self.unfinished -= 1
        if not self.unfinished:
            self._agenda.stop()

    def _row(self, request_id: RequestId) -> RequestRow:
        return self.outcome.rows[int(request_id)]

    def _next_step(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        step = engine.model.step or engine.model.begin_step(now, max_fused_steps=FUSED_STEPS_MAX)
        engine.wake += 1
        if step is None and engine.model.loaded_at is not None:
            self._agenda.at(engine.model.loaded_at, lambda at, w=engine.wake: self._loaded(engine, w, at))  # type: ignore[misc]
        if step is not None:
            self._agenda.at(step.ends_at, lambda at, w=engine.wake: self._step_ended(engine, w, at))  # type: ignore[misc]

    def _loaded(self, engine: SimulatedEngine, wake: int, now: EngineSeconds) -> None:
        if wake == engine.wake and engine.alive:
            self._next_step(engine, now)

    def _step_ended(self, engine: SimulatedEngine, wake: int, now: EngineSeconds) -> None:
        if wake != engine.wake or not engine.alive:
            return
        step, result = engine.model.step, engine.model.end_step(now)
        if step is not None and result.decoded:
            engine.gaps.append((step.seconds / step.count, step.count))
        self.fleet.deliver(engine, result.changes, now)
        self._answer(engine, result, now)
        self._next_step(engine, now)

    def _answer(self, engine: SimulatedEngine, result: StepResult, now: EngineSeconds) -> None:
        own = [ended for ended in result.first_tokens if not self._transfers.owns(ended.request)]
        handed_over = {ended.request for ended in own if self._hands_over(ended.request)}
        for ended in own:
            if ended.request in handed_over:
                self._hand_over(engine, ended, now)
            else:
                self._first_token(engine, ended, now)
        for request_id in result.finished:
            if request_id not in handed_over and not self._transfers.finished(request_id, now):
                self._finish(engine, request_id, now)
        if result.first_tokens or result.finished:
            self.carry_out(self._dispatcher.grant_waiting(engine.id, now), now)

    def _hand_over(self, engine: SimulatedEngine, ended: PrefillEnded, now: EngineSeconds) -> None:
        request = self.state.workload.requests[ended.request]
        row = self._row(ended.request)
        row.cached_tokens, row.loaded_tokens = ended.cached_tokens, ended.loaded_tokens
        command = HandOverRequest(
            request=request.id, attempt=request.attempt, instance=engine.id, prefill=now - request.granted_at
        )
        self.carry_out(self._dispatcher.hand_over(command, now), now)

    def _first_token(self, engine: SimulatedEngine, ended: PrefillEnded, now: EngineSeconds) -> None:
        row, request = self._row(ended.request), self.state.workload.requests[ended.request]
        row.first_token_at, row.instance = now, engine.id
        self._gaps_before[ended.request] = len(engine.gaps)
        if not request.prefilled_by:
            row.cached_tokens, row.loaded_tokens = ended.cached_tokens, ended.loaded_tokens
            if self._scenario.fetch_path == "direct":
                row.cached_tokens += row.fetched_tokens
        prefill = now - request.granted_at
        ttft = now - row.arrived_at
        self.pool.apply(
            PrefillFinished(at=now, request=ended.request, instance=engine.id, ttft=ttft, prefill=prefill), now
        )
        if request.copy_to:
            self._transfers.copy(request, now)

    def _finish(self, engine: SimulatedEngine, request_id: RequestId, now: EngineSeconds) -> None:
        row = self._row(request_id)
        assert row.first_token_at is not None
        tokens = row.output_tokens
        row.tbt_p90 = engine.tbt_p90(self._gaps_before.pop(request_id)) if tokens > 1 else None
        event = RequestFinished(
            at=now,
            request=request_id,
            instance=engine.id,
            e2e=now - row.arrived_at,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=row.cached_tokens,
            ttft=row.first_token_at - row.arrived_at,
            tpot=(now - row.first_token_at) / (tokens - 1) if tokens > 1 else 0.0,
        )
        self.pool.apply(event, now)
        self._end(request_id, now, "finished")

    def _sample(self, now: EngineSeconds) -> None:
        queues = self.state.workload.queues
        instances = self.state.fleet.ready
        pending = tuple(queues[i].queued_tokens if i in queues else 0 for i in instances)
        running = tuple(len(queues[i].decoding) if i in queues else 0 for i in instances)
        self.outcome.samples.append(LoadSample(now, pending, running, instances))

    def _scale(self, now: EngineSeconds) -> None:
        assert self._scaler is not None
        self.carry_out(self._scaler.tick(now), now)

    def _rebalance(self, now: EngineSeconds) -> None:
        self.pool.catch_up(now)
        plan = self._rebalancing.plan(self.pool.seen, now)
        if plan.migrations:
            self.carry_out(self._dispatcher.migrate(plan, now), now)
