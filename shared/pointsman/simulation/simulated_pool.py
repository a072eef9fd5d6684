"""Shared parts of a simulation: production State and Dispatcher, agenda and outcome. With `Scenario.load_lag_s`
policies use a second State (`seen`) that gets every event later."""

from collections import deque

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.policies.seeded_random import uniform
from pointsman.primitives import EngineSeconds, Term, Tokens
from pointsman.simulation.event_queue import EventQueue
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.scenario import FleetMirror, Scenario
from pointsman.state.fleet import Instance
from pointsman.state.latency_model import LatencyModel
from pointsman.state.state import PoolSettings, State


class SimulatedPool:
    def __init__(self, scenario: Scenario, mirror: FleetMirror, agenda: EventQueue, outcome: Outcome) -> None:
        self.scenario = scenario
        self.mirror = mirror
        self.agenda = agenda
        self.outcome = outcome
        self.profile = mirror.profile_of(scenario)
        self._policies = policy_set(
            routing=scenario.routing,
            admission=scenario.admission,
            ordering=scenario.ordering,
            settings=scenario.routing_settings,
            prefill_window_tokens=scenario.prefill_window_tokens,
            running_max=scenario.running_max,
            pending_max=scenario.pending_max,
            copies=scenario.copies,
            recorded=True,
        )
        self.state = self._new_state()
        self.seen = self._new_state() if scenario.load_lag_s > 0 else self.state
        self.lags = self.seen is not self.state
        self._unseen: deque[tuple[EngineSeconds, LogEvent]] = deque()
        self.dispatcher = Dispatcher(self.state, self._policies, term=Term(1), policy_state=self.seen)

    def apply(self, event: LogEvent, now: EngineSeconds) -> None:
        self.state.apply(event)
        if self.lags:
            self.show_later(event, now)

    def show_later(self, event: LogEvent, now: EngineSeconds) -> None:
        self._unseen.append((now + self.scenario.load_lag_s, event))

    def catch_up(self, now: EngineSeconds) -> None:
        unseen = self._unseen
        while unseen and unseen[0][0] <= now:
            self.seen.apply(unseen.popleft()[1])

    @property
    def transfer_tokens_per_s(self) -> float:
        return self.scenario.kv_transfer_gb_per_s * 1e9 / self.profile.kv_bytes_per_token

    def _new_state(self) -> State:
        scenario = self.scenario
        settings = PoolSettings(
            block_tokens=scenario.block_tokens,
            speed=self.mirror.speed,
            affinity_level_tokens=max(scenario.affinity_level_tokens, scenario.block_tokens),
            hot_share=scenario.hot_share,
            cold_share=scenario.cold_share,
        )
        latency = _NoisyLatency(scenario) if scenario.estimate_error[0] else None
        scaling = SloAttainment().trackers() if scenario.role_switching else ()
        return State(settings, (*self._policies.trackers(), *scaling), latency=latency)


class _NoisyLatency(LatencyModel):
    """A wrong cost model for a share of the prompts, always the same for the same length."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.block_tokens)
        self._scenario = scenario

    @override
    def prefill_seconds(self, instance: Instance, prompt_tokens: Tokens, cached_tokens: Tokens) -> EngineSeconds:
        share, size = self._scenario.estimate_error
        seconds = super().prefill_seconds(instance, prompt_tokens, cached_tokens)
        draw = uniform(self._scenario.seed, "estimate", str(prompt_tokens))
        if draw >= share:
            return seconds
        return seconds * (1 + size if draw < share / 2 else 1 - size)
