"""Logs with a planted cause of slow requests, and what has to be said of them. What is right is worked out from what was
planted, not with the code under test."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from pointsman.contracts.requests import RequestFinished
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from tests.support.served_log import ServedLog

LONG_BLOCKS = 900
BLOCK = 64


@dataclass(frozen=True, eq=False)
class Planted:
    """`requests`: those that suffered from it, by their number (of those answered). `says`: in the verdict. `never`: what must
    stand nowhere in the sentences. `doctor`: its first line."""

    log: dict[str, Any]
    cause: str
    says: str
    doctor: str
    never: tuple[str, ...] = ()
    after: float = 0.0
    on: str = ""
    exit_code: int = 0
    first_says: str = ""
    names: tuple[str, ...] = ()


CASES = {
    "a hot prefix": Planted(
        log={"families": 1, "gap": 0.1, "requests": 200, "own_blocks": dict.fromkeys(range(200), 4)}
        | {"policies": policy_set(routing="cache_affinity", admission="none")},
        cause="hot_prefix",
        says=r"its prefix is hot \(100% of arrivals\): (\d+) of the \1 requests ahead of it on engine-\d began with the same 512 "
        r"tokens, while engine-\d (?:was|and engine-\d were) idle",
        doctor="they queued for the engine that holds a hot prefix",
        never=("was slow", "unusual", "stale"),
        names=("cache_affinity sends a prefix always to the same engine",),
    ),
    "a slow engine": Planted(
        log={"pace": {"engine-2": 6.0}, "gap": 0.25, "policies": policy_set(routing="round_robin")},
        cause="slow_engine",
        says=r"engine-2 was slow: it took 6\.\d times what its cost model says",
        doctor="engine-2",
        never=("stale", "hot", "overload"),
        on="engine-2",
        names=("it was engine-2 alone",),
    ),
    "a cache emptied behind its back": Planted(
        log={"emptied": {"engine-3": 25.0}, "requests": 100, "own_blocks": dict.fromkeys(range(100), 2)}
        | {"policies": policy_set(routing="cache_affinity", admission="none")},
        cause="stale_index",
        says=r"the index was stale: [\d,]+ tokens expected in the cache of engine-3 were not there",
        doctor="the cache of engine-3 was emptied behind its back",
        never=("was slow", "times as long", "times what", "unusual"),
        after=24.0,
        on="engine-3",
        first_says="the index said that 512 were cached, the engine found 0",
    ),
    "overload": Planted(
        log={"gap": 0.05, "requests": 150, "families": 150, "policies": policy_set(admission="none")},
        cause="overload",
        says=r"all 3 engines were busy, the least of them with \d\.\d{3} s of work: \d+ requests with [\d,]+ tokens were ahead of it on engine-\d",
        doctor="every engine had a queue (overload)",
        never=("was slow", "stale", "hot", "was idle"),
        exit_code=1,
    ),
    "a long prompt ahead": Planted(
        log={"own_blocks": {50: LONG_BLOCKS}, "requests": 80, "engines": 2, "gap": 0.2}
        | {"policies": policy_set(routing="round_robin", admission="none")},
        cause="long_prompt_ahead",
        says=rf"[\d,]+ tokens were ahead of it on engine-1, {LONG_BLOCKS * BLOCK + 1:,} of them one prompt",
        doctor="a long prompt was ahead of them",
        never=("was slow", "stale", "calibrate", "unusual"),
        first_says="request r-50",
        names=("round_robin takes the engines in turn and looks at no queue",),
    ),
}  # fmt: skip


@cache
def planted(case: Planted) -> list[LogEntry]:
    return ServedLog(**case.log).entries


def slowest_of(entries: list[LogEntry], case: Planted) -> str:
    """The request with the longest TTFT, of those that met the fault, and with another before it than its own."""
    ends = [entry.event for entry in entries if isinstance(entry.event, RequestFinished)]
    met = [
        e
        for e in ends
        if e.at > case.after and e.instance.startswith(case.on) and e.prompt_tokens < LONG_BLOCKS * BLOCK
    ]
    return max(met, key=lambda event: event.ttft).request
