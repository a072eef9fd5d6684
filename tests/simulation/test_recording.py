"""What decisions record of what was weighed: the log of a leader that records little, beside that of one that records all."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    Candidate,
    HandOverRefused,
    LeaderElected,
    RequestHandedOver,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import Role
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import fold, verify
from tests.support.events import joined, route
from tests.support.logged_leader import LoggedLeader
from tests.support.recorded_log import RecordedFleet, rewritten

EVERY = 7
POOLS: dict[str, tuple[Role, ...]] = {
    "whole": (),
    "split": ("prefill", "decode") * 5,
    "partly split": ("both", "prefill", "decode", "both", "decode"),
}


@cache
def log_of(pool: str, rivals: int | None) -> list[LogEntry]:
    """The same history whatever is recorded."""
    told = policy_set(routing="min_ttft", admission="predicted_ttft", prefill_window_tokens=900)
    every = 1 if rivals is None else EVERY
    fleet = RecordedFleet(
        told,
        seed=len(pool),
        engines=10,
        roles=POOLS[pool],
        failing=True,
        limited=True,
        recording=lambda: Recording(rivals, settings_every=every),
    ).live(1200)
    fleet.take_over()
    return fleet.live(800).write_all().entries


def events(entries: list[LogEntry]) -> list[LogEvent]:
    return [entry.event for entry in entries if entry.event is not None]


def nearest(weighed: Sequence[Any], chosen: str, rivals: int, *orders: Callable[[Any], Any]) -> list[Any]:
    """By sorting, one place at a time."""
    left, kept = [c for c in weighed if c.instance != chosen], [c.instance for c in weighed if c.instance == chosen]
    for place in range(min(rivals, len(left))):
        soonest = place < rivals - rivals // 2
        first = sorted(left, key=orders[0] if soonest else orders[1])[0]
        left.remove(first)
        kept.append(first.instance)
    return [c for c in weighed if c.instance in kept]


def by_ttft(candidate: Candidate) -> Any:
    return candidate.predicted_ttft, -candidate.hit_blocks


def by_hit(candidate: Candidate) -> Any:
    return -candidate.hit_blocks, candidate.predicted_ttft


def by_pace(candidate: Any) -> Any:
    known = candidate.predicted_tpot is not None
    return (not known, candidate.predicted_tpot if known else candidate.requests)


def by_transfer(candidate: Any) -> Any:
    return candidate.transfer_tokens, -candidate.free_tokens


def cut(event: LogEvent, rivals: int, *, with_settings: bool) -> LogEvent:
    """What is to be recorded of an event that has everything."""
    changes: dict[str, Any] = {}
    if isinstance(event, RequestPlaced | RequestRejected):
        chosen, decode = (event.instance, event.decode) if isinstance(event, RequestPlaced) else ("", "")
        changes["candidates"] = nearest(event.candidates, chosen, rivals, by_ttft, by_hit)
        changes["decode_candidates"] = nearest(event.decode_candidates, decode, rivals, by_pace, by_transfer)
        changes["decode_others"] = len(event.decode_candidates) - len(changes["decode_candidates"])
        changes |= {} if with_settings else {"settings": {}}
    elif isinstance(event, RequestHandedOver | HandOverRefused):
        chosen = event.instance if isinstance(event, RequestHandedOver) else InstanceId("")
        changes["candidates"] = nearest(event.candidates, chosen, rivals, by_pace, by_transfer)
    else:
        return event
    return msgspec.structs.replace(event, others=len(event.candidates) - len(changes["candidates"]), **changes)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("rivals", [0, 1, 2, 3])
def test_a_log_with_few_candidates_is_that_with_all_of_them_shortened(pool: str, rivals: int) -> None:
    whole, short = events(log_of(pool, None)), events(log_of(pool, rivals))
    kinds: Counter[str] = Counter()

    assert len(short) == len(whole)
    for recorded, full in zip(short, whole, strict=True):
        stated = bool(getattr(recorded, "settings", None))
        assert recorded == cut(full, rivals, with_settings=stated)
        kinds[type(recorded).__name__] += bool(getattr(recorded, "others", 0) or getattr(recorded, "decode_others", 0))
    assert kinds["RequestPlaced"] > 4
    assert kinds["RequestRejected"] or rivals
    assert kinds["RequestHandedOver"] or pool == "whole" or rivals > 2


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("rivals", [0, 1, 2, 3])
def test_what_was_recorded_of_each_decision_is_computed_again_bit_for_bit(pool: str, rivals: int) -> None:
    verdict = verify(log_of(pool, rivals))

    assert str(verdict) == f"decisions {verdict.decisions:,}, identical {verdict.decisions:,}, different 0"
    assert verdict.problems == []


def test_the_number_of_rivals_may_change_within_a_term() -> None:
    changing = Recording(2, settings_every=EVERY)
    fleet = RecordedFleet(policy_set(routing="min_ttft"), seed=5, engines=8, failing=True, recording=lambda: changing)
    for rivals in (2, None, 0, 1):
        changing.rivals = rivals
        fleet.live(200)
    counts = {e.others for e in events(fleet.write_all().entries) if isinstance(e, RequestPlaced)}

    assert verify(fleet.entries).different == 0
    assert len(counts) > 2


@pytest.mark.parametrize(
    "forged",
    [
        lambda e: {"candidates": [_longer(c) if c.instance != e.instance else c for c in e.candidates]},
        lambda e: {"candidates": [_longer(c) if c.instance == e.instance else c for c in e.candidates]},
        lambda e: {"others": e.others + 1},
        lambda e: {"settings": {"running_max": 1.0}},
    ],
)
def test_a_forged_rival_and_a_wrong_number_of_others_are_found(forged: Callable[[Any], dict[str, Any]]) -> None:
    entries = log_of("whole", 3)
    placed = [(e.sequence, e.event) for e in entries if isinstance(e.event, RequestPlaced) and e.event.others]
    sequence, event = placed[len(placed) // 2]

    verdict = verify(rewritten(entries, sequence, msgspec.structs.replace(event, **forged(event))))

    assert verdict.first is not None
    assert (verdict.different, verdict.first.sequence) == (1, sequence)


def _longer(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds + 1e-12)


def test_settings_are_repeated_now_and_then_and_are_known_in_between() -> None:
    entries = log_of("whole", 2)
    asked = [
        e for e in events(entries) if isinstance(e, RequestPlaced | RequestRejected) and e.policy != "tenant_limits"
    ]
    elected = [e for e in events(entries) if isinstance(e, LeaderElected)]
    term = entries[: next(n for n, e in enumerate(entries) if isinstance(e.event, LeaderElected) and e.event.term == 2)]
    state = fold(term)
    placed = next(e for e in asked if e.stamp is not None and e.stamp.term == 1 and not e.settings)

    assert len(asked) // EVERY - 1 <= sum(bool(e.settings) for e in asked) <= len(asked) // EVERY
    assert state.settings_of(placed) == elected[0].settings
    assert state.settings_of(msgspec.structs.replace(placed, policy="tenant_limits")) == {}
    later = fold(term[term.index(next(e for e in term if e.event is placed)) :])
    assert later.settings_of(placed) == next(e.settings for e in asked if e.settings)


def test_zero_seconds_are_not_written() -> None:
    optional = rb'"(transfer_seconds|lost_seconds|load_seconds|fetch_seconds|copy_seconds|held_up)":0\.0[,}]'

    assert not [e.payload for e in log_of("whole", 2) if re.search(optional, e.payload)]


def test_a_long_prompt_over_a_limit_costs_the_log_little_and_earlier_logs_with_all_its_keys_verify() -> None:
    leader = LoggedLeader()
    leader.lead(policy_set(admission="none"), at=0.0)
    leader.happens(joined("a", at=0.0))
    one = TenantPolicies(default=TenantPolicy(concurrency=1))
    leader.decides(leader.dispatcher.set_tenant_policies(one, 0.0, by="alice"))
    keys = list(range(10**18, 10**18 + 2000))
    for name in ("served", "refused"):
        leader.decides(leader.dispatcher.route(route(name, keys), 1.0))
    served, refused = [e for e in leader.log if isinstance(e.event, RequestArrived)]
    assert isinstance(served.event, RequestArrived)
    assert isinstance(refused.event, RequestArrived)

    assert list(unpack_keys(served.event.keys)) == keys
    assert sum(len(e.payload) for e in leader.log[refused.sequence - 1 :]) < 2_000 < len(served.payload)
    assert leader.proven

    leader.log = rewritten(leader.log, refused.sequence, msgspec.structs.replace(refused.event, keys=served.event.keys))
    assert leader.proven
