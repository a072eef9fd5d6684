"""One instance that prefills one request at a time, driven through State and Dispatcher in virtual time."""

from dataclasses import dataclass

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering import OrderingPolicy
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.primitives import InstanceId, RequestId, Term
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from tests.support.events import BLOCK, COST, finished, first_token, joined, route

INSTANCE = "a"
BUSY = RequestId("before-all")


@dataclass(slots=True)
class Served:
    """What one tenant was granted and, for output, has got. `promised_tokens`: to compute, of requests that were placed to be on
    time."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    promised_tokens: int = 0
    output_tokens: int = 0
    promised_output_tokens: int = 0


class SingleServer:
    """A millisecond a token (`events.COST`). An answer of `output` tokens is whole `decode_seconds` after its first one."""

    def __init__(
        self,
        ordering: OrderingPolicy,
        *,
        busy: bool = False,
        decode_seconds: float = 0.0,
        prefill_window_tokens: int = 1,
        running_max: int = 256,
    ) -> None:
        """`busy`: a request of a block is in prefill, so that those who arrive wait."""
        policies = PolicySet(
            routing=RoundRobin(),
            admission=AdmitAll(),
            ordering=ordering,
            prefill_window_tokens=prefill_window_tokens,
            running_max=running_max,
        )
        self.state = State(PoolSettings(), policies.trackers())
        self.state.apply(joined(INSTANCE))
        self.dispatcher = Dispatcher(self.state, policies, term=Term(1))
        self.now = 0.0
        self.on_time = 0
        self.granted: list[Request] = []
        self._decode_seconds = decode_seconds
        self._outputs: dict[RequestId, int] = {}
        self._decoding: list[tuple[float, RequestId]] = []
        self._served: dict[str, Served] = {}
        self._keys: dict[str, list[int]] = {}
        self._next_key = 1
        if busy:
            self.hold()

    def hold(self) -> None:
        """Put a request in prefill that is over just now, which `run` or `release` says."""
        prefill_seconds = (BLOCK + 1) * COST.per_token_s
        self.now -= prefill_seconds
        self.arrive(BUSY, blocks=1, slo_ttft=1e9)
        self.now += prefill_seconds

    def release(self) -> None:
        if BUSY in self.state.workload.requests:
            self._apply(first_token(BUSY, INSTANCE, at=self.now))
            self._apply(finished(BUSY, INSTANCE, at=self.now, completion_tokens=0))
            self._served.clear()
            self.granted.clear()
            self._note(self.dispatcher.grant_waiting(InstanceId(INSTANCE), self.now))

    def keys(self, name: str) -> list[int]:
        """The prompt of the request of that name, or of one to come."""
        return self._keys.setdefault(name, self.fresh_keys(64))

    def fresh_keys(self, count: int) -> list[int]:
        self._next_key += count
        return list(range(self._next_key - count, self._next_key))

    def arrive(
        self,
        request: str,
        *,
        blocks: int = 1,
        keys: list[int] | None = None,
        tenant: str = "t",
        output: int = 0,
        slo_ttft: float = 5.0,
    ) -> None:
        """A prompt of so many blocks that nobody else shares, or of these."""
        prompt = keys if keys is not None else self.keys(request)[:blocks]
        self._keys[request] = prompt
        self._outputs[RequestId(request)] = output
        command = route(request, prompt, arrived_at=self.now, tenant=tenant, slo_ttft=slo_ttft)
        self._note(self.dispatcher.route(command, self.now))

    def advance(self, seconds: float) -> None:
        """Time passes, and whatever is in prefill takes that much longer."""
        self.now += seconds

    def waiting(self, tenant: str) -> int:
        return sum(
            request.tenant == tenant for request in self.state.workload.queue(InstanceId(INSTANCE)).pending.values()
        )

    def served(self, tenant: str) -> Served:
        return self._served.setdefault(tenant, Served())

    def run(self, count: int | None = None) -> list[str]:
        """Prefill so many of the waiting requests, or all; their names in the order of their first tokens."""
        self.release()
        names: list[str] = []
        while count is None or len(names) < count:
            if not self.granted and self._decoding:
                self._end_decoding(self._decoding[0][0])
            if not self.granted:
                break
            names.append(str(self._prefill_next().id))
        return names

    def _prefill_next(self) -> Request:
        request = self.granted.pop(0)
        self.now += request.prefill_seconds
        self.on_time += self.now <= request.deadline
        self._apply(first_token(str(request.id), INSTANCE, at=self.now))
        self._decoding.append((self.now + self._decode_seconds, request.id))
        self._end_decoding(self.now)
        return request

    def _end_decoding(self, until: float) -> None:
        self.now = max(self.now, until)
        while self._decoding and self._decoding[0][0] <= self.now:
            _, ended = self._decoding.pop(0)
            output = self._outputs.pop(ended)
            request = self.state.workload.requests[ended]
            served = self.served(request.tenant)
            served.output_tokens += output
            served.promised_output_tokens += output if _is_promised(request) else 0
            self._apply(finished(ended, INSTANCE, at=self.now, completion_tokens=output))
        self._note(self.dispatcher.grant_waiting(InstanceId(INSTANCE), self.now))

    def _apply(self, event: LogEvent) -> None:
        self.state.apply(event)

    def _note(self, events: list[LogEvent]) -> None:
        for event in events:
            if isinstance(event, RequestGranted):
                request = self.state.workload.requests[event.request]
                self.granted.append(request)
                served = self.served(request.tenant)
                served.prompt_tokens += request.prompt_tokens
                served.computed_tokens += request.uncached_tokens
                served.promised_tokens += request.uncached_tokens if _is_promised(request) else 0


def _is_promised(request: Request) -> bool:
    return request.placed_at + request.predicted_ttft <= request.deadline
