"""Deficit counters (as in deficit round robin) by client and instance, after D2LPM (Cao et al., Algorithm 2). A placement
is charged its uncached tokens, or all of the prompt; an answer its tokens times `output_weight`. A client placed on an
exhausted counter gets the same whole number of quanta everywhere, as few as make it positive."""

from collections import OrderedDict
from math import floor

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, Tenant
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

CLIENTS_MAX = 10_000
"""The client placed longest ago is dropped first."""


class Deficits(Tracker):
    def __init__(self, quantum_tokens: float, output_weight: float, *, charges_cached: bool = False) -> None:
        self._quantum = quantum_tokens
        self._output_weight = output_weight
        self._charges_cached = charges_cached
        self._instances: dict[InstanceId, None] = {}
        self._counters: OrderedDict[Tenant, dict[InstanceId, float]] = OrderedDict()

    def tokens_left(self, client: Tenant, instance: InstanceId) -> float:
        return self._counters.get(client, {}).get(instance, 0.0)

    def quanta_needed(self, client: Tenant, instance: InstanceId) -> int:
        left = self.tokens_left(client, instance)
        return 0 if left > 0 else floor(-left / self._quantum) + 1

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        client, instance = request.tenant, request.instance
        self._refill(client, self.quanta_needed(client, instance))
        self._spend(client, instance, self._price(request))
        self._counters.move_to_end(client)
        if len(self._counters) > CLIENTS_MAX:
            self._counters.popitem(last=False)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._give_back(request)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if finished is not None:
            output_tokens = max(0, finished.completion_tokens)
            home = request.prefilled_by or request.instance
            self._spend(request.tenant, home, self._output_weight * output_tokens)
        elif request.stage is Stage.PENDING:
            self._give_back(request)

    @override
    def joined(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._instances[instance] = None

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._instances.pop(instance, None)
        for pairs in self._counters.values():
            pairs.pop(instance, None)

    def _refill(self, client: Tenant, quanta: int) -> None:
        pairs = self._counters.setdefault(client, {})
        if quanta:
            for instance in self._instances:
                pairs[instance] = pairs.get(instance, 0.0) + quanta * self._quantum

    def _give_back(self, request: Request) -> None:
        self._spend(request.tenant, request.instance, -self._price(request))

    def _price(self, request: Request) -> float:
        return request.prompt_tokens if self._charges_cached else request.uncached_tokens

    def _spend(self, client: Tenant, instance: InstanceId, tokens: float) -> None:
        pairs = self._counters.get(client)
        if pairs is not None and instance in self._instances:
            pairs[instance] = pairs.get(instance, 0.0) - tokens
