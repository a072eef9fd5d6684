"""A log of a fleet that serves requests as it should, in virtual time, with the faults that a test asks for.

The leader is the production Dispatcher. Engines prefill one request after the other, in the seconds that their cost
model says times a pace; what they cache is told at once and reported every second, as a worker does. Without a fault
there is nothing to complain about.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from heapq import heappop, heappush
from itertools import count
from random import Random

from pointsman.contracts.cache import BlocksStored
from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.fleet import DecodeCost, InstanceProbed
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.contracts.subjects import subject_of
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, PoolName, Term
from pointsman.state.state import PoolSettings, State
from tests.support.events import BLOCK, COST, joined, reported, route, stored

POOL = PoolName("default")
OUTPUT_TOKENS = 20
TOKEN_SECONDS = 0.02
GIVEN_BLOCKS = 8
"""Blocks that every prompt of a family begins with."""


class ServedLog:
    """`entries` is the log of `requests` requests, one each `gap` seconds; `policies` are those of its leader."""

    def __init__(
        self,
        *,
        requests: int = 200,
        gap: EngineSeconds = 0.4,
        engines: int = 3,
        families: int = 12,
        pace: Mapping[str, float] | None = None,
        skew: Mapping[str, EngineSeconds] | None = None,
        policies: PolicySet | None = None,
        tenants: Sequence[str] = ("t",),
        limits: TenantPolicies | None = None,
        seed: int = 1,
        own_blocks: Mapping[int, int] | None = None,
        emptied: Mapping[str, EngineSeconds] | None = None,
        token_seconds: EngineSeconds = TOKEN_SECONDS,
        stumbles: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """`own_blocks` behind those of its family, by number of the request. `emptied`: when an engine's cache is emptied
        and no event says so. `token_seconds` of decoding. `stumbles`: every n-th prefill of an engine takes so many times as long.

        `tenants` take turns; `limits` are theirs. `pace`: seconds of a prefill over what the cost model says, by instance. `skew`: how far a worker's clock is
        ahead."""
        self.entries: list[LogEntry] = []
        self._pace = pace or {}
        self._skew = skew or {}
        self._own_blocks = own_blocks or {}
        self._token_seconds = token_seconds
        self._stumbles = stumbles or {}
        self._served: dict[InstanceId, int] = {}
        self._random = Random(seed)
        self._agenda: list[tuple[EngineSeconds, int, Callable[[EngineSeconds], None]]] = []
        self._order = count()
        self._cached: dict[InstanceId, list[int]] = {}
        self._coming: dict[InstanceId, set[int]] = {}
        self._sequences: dict[InstanceId, int] = {}
        self._free_at: dict[InstanceId, EngineSeconds] = {}
        settings = PoolSettings(block_tokens=BLOCK)
        self.policies = chosen = policies or policy_set(routing="min_ttft")
        self.state = State(settings, chosen.trackers())
        self._leader = Dispatcher(self.state, chosen, term=Term(1))
        elected = LeaderElected(
            at=0.0, term=Term(1), scheduler="scheduler-1", as_of=0, pool=asdict(settings),
            policy=chosen.routing.name, settings=chosen.settings,
        )  # fmt: skip
        self._write(elected, follow=True)
        self._tenants = tenants
        if limits is not None:
            self._carry_out(self._leader.set_tenant_policies(limits, 0.0, by="alice"), 0.0)
        end = requests * gap + 20.0
        for number in range(1, engines + 1):
            self._join(InstanceId(f"engine-{number}"), end)
        for number in range(requests):
            family = self._random.randrange(families)
            self._at(1.0 + number * gap, lambda now, n=number, f=family: self._arrive(n, f, now))  # type: ignore[misc]
        for name, at in (emptied or {}).items():
            self._at(at, self._empty(InstanceId(name)))
        while self._agenda:
            at, _, act = heappop(self._agenda)
            act(at)

    def _at(self, at: EngineSeconds, act: Callable[[EngineSeconds], None]) -> None:
        heappush(self._agenda, (at, next(self._order), act))

    def _empty(self, name: InstanceId) -> Callable[[EngineSeconds], None]:
        return lambda _: self._coming[name].clear()

    def _write(self, event: LogEvent, *, follow: bool) -> None:
        """Put it into the log; with `follow` the leader takes it in from there, otherwise it has applied it already."""
        sequence = len(self.entries) + 1
        payload = encode(event)
        self.entries.append(LogEntry(sequence, subject_of(POOL, event), payload, decode_event(payload)))
        if follow:
            self.state.apply(event, sequence)
        else:
            self.state.skip(sequence)

    def _join(self, name: InstanceId, end: EngineSeconds) -> None:
        self._cached[name], self._coming[name] = [], set()
        self._sequences[name], self._free_at[name] = 0, 0.0
        decode = DecodeCost(step_s=self._token_seconds)
        self._write(joined(name, at=self._clock(name, 0.0), decode=decode), follow=True)
        self._write(InstanceProbed(at=0.5, instance=name, epoch=Epoch(1), parity=True), follow=True)

        def report(now: EngineSeconds) -> None:
            keys = self._cached[name]
            event = reported(name, self._sequences[name], keys, at=self._clock(name, now))
            self._write(event, follow=True)
            if now < end:
                self._at(now + 1.0, report)

        self._at(1.0 + self._random.random(), report)

    def _clock(self, name: InstanceId, now: EngineSeconds) -> EngineSeconds:
        return now + self._skew.get(name, 0.0)

    def _arrive(self, number: int, family: int, now: EngineSeconds) -> None:
        shared = [1000 * (family + 1) + level for level in range(GIVEN_BLOCKS)]
        blocks = self._own_blocks.get(number, self._random.randint(1, 6))
        first = 1_000_000 + 100 * number if blocks <= 100 else 10_000_000 + 1_000 * number
        own = list(range(first, first + blocks))
        command = route(
            f"r-{number}",
            shared + own,
            arrived_at=now,
            session=f"s-{family}",
            max_output_tokens=50,
            tenant=self._tenants[number % len(self._tenants)],
        )
        self._carry_out(self._leader.route(command, now), now)

    def _carry_out(self, events: list[LogEvent], now: EngineSeconds) -> None:
        for event in events:
            self._write(event, follow=False)
        for event in events:
            if isinstance(event, RequestGranted):
                self._serve(event, now)

    def _serve(self, grant: RequestGranted, now: EngineSeconds) -> None:
        request = self.state.workload.requests[grant.request]
        name = grant.instance
        held = self._coming[name]  # first come, first served: by the time it begins, all before it is cached
        hit = next((n for n, key in enumerate(request.keys) if key not in held), len(request.keys))
        held.update(int(key) for key in request.keys)
        cached = self.state.latency.cached_tokens(self.state.fleet[name], hit, request.prompt_tokens)
        work = COST.seconds(request.prompt_tokens, cached) * self._pace.get(name, 1.0)
        self._served[name] = self._served.get(name, 0) + 1
        every, longer = self._stumbles.get(name, (1, 1.0))
        work *= longer if self._served[name] % every == 0 else 1.0
        first_at = max(now, self._free_at[name]) + work
        self._free_at[name] = first_at
        keys, arrived_at = [int(key) for key in request.keys], request.arrived_at

        def first_token(at: EngineSeconds) -> None:
            self._cache(name, keys, at)
            event = PrefillFinished(at=at, request=grant.request, instance=name, ttft=at - arrived_at, prefill=at - now)
            self._write(event, follow=True)
            self._carry_out(self._leader.grant_waiting(name, at), at)

        def answered(at: EngineSeconds) -> None:
            event = RequestFinished(
                at=at, request=grant.request, instance=name, e2e=at - arrived_at, prompt_tokens=request.prompt_tokens,
                completion_tokens=OUTPUT_TOKENS, cached_tokens=cached, ttft=first_at - arrived_at, tpot=self._token_seconds,
            )  # fmt: skip
            self._write(event, follow=True)
            self._carry_out(self._leader.grant_waiting(name, at), at)

        self._at(first_at, first_token)
        self._at(first_at + self._token_seconds * (OUTPUT_TOKENS - 1), answered)

    def _cache(self, name: InstanceId, keys: list[int], at: EngineSeconds) -> None:
        held = set(self._cached[name])
        fresh = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        if fresh == len(keys):
            return
        self._sequences[name] += 1
        parent = keys[fresh - 1] if fresh else 0
        event: BlocksStored = stored(name, self._sequences[name], keys[fresh:], parent=parent, at=self._clock(name, at))
        self._cached[name] += keys[fresh:]
        self._write(event, follow=True)
