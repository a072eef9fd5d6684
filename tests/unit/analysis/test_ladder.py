"""The ladder on small logs: what counts, when, and what changes nothing."""

from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman.analysis.ladder import HINDSIGHT_WALL_SECONDS, HitRateLadder
from pointsman.analysis.ladder_figures import HOURS_MAX, OTHER, TENANTS_MAX, LadderFigures, Rung, Tally
from pointsman.analysis.tier_shares import TierCounter
from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, TierTokens
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import RequestFailed, RequestFinished
from pointsman.primitives import BlockKey, InstanceId, RequestId, Term
from pointsman.state.state import PoolSettings, State
from tests.support.events import (
    BLOCK,
    arrived,
    finished,
    first_token,
    given_up,
    joined,
    no_instance,
    placed,
    removed,
    stored,
)

PROMPT = [1, 2, 3, 4]
TOKENS = len(PROMPT) * BLOCK


class Told:
    """A ladder that is told a log."""

    def __init__(self, *instances: str, capacity: int = 100_000) -> None:
        settings = PoolSettings(block_tokens=BLOCK)
        self.state, self.ladder = State(settings), HitRateLadder(settings)
        self.ladder.begin(self.state)
        self._sequences = count(1)
        for instance in instances or ("a", "b"):
            self.tell(joined(instance, kv_capacity_tokens=capacity))

    def tell(self, *events: LogEvent) -> None:
        for event in events:
            self.state.apply(event, next(self._sequences))
            self.ladder.apply(event, self.state)

    def places(
        self, request: str, instance: str, keys: list[int], *, at: float, hit: int = 0, tenant: str = "t", **fields: Any
    ) -> RequestPlaced:
        packed, prompt = pack_keys([BlockKey(key) for key in keys]), len(keys) * BLOCK + 1
        arrival = arrived(request, at=at, tenant=tenant, keys=packed, prompt_tokens=prompt, **fields)
        placement = placed(request, instance, at=at, hit_blocks=hit, uncached_tokens=prompt - hit * BLOCK)
        self.tell(arrival, placement, RequestGranted(at=at, request=RequestId(request), instance=InstanceId(instance)))
        return placement

    def ends(self, request: str, instance: str, *, at: float, cached: int, prompt: int = TOKENS + 1) -> RequestFinished:
        end = finished(request, instance, at=at, prompt_tokens=prompt, cached_tokens=cached)
        self.tell(first_token(request, instance, at=at), end)
        return end

    def serves(self, request: str, instance: str, keys: list[int], *, at: float, cached: int) -> None:
        self.places(request, instance, keys, at=at, hit=cached // BLOCK)
        self.ends(request, instance, at=at + 1.0, cached=cached, prompt=len(keys) * BLOCK + 1)

    @property
    def tokens(self) -> dict[str, int]:
        self.ladder.settle(self.state)
        tally = self.ladder.figures.ever
        return dict(zip(Rung, tally.tokens, strict=True))


def test_a_prompt_does_not_see_itself_and_the_next_one_does() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    assert set(told.tokens.values()) == {0}

    told.serves("r2", "b", PROMPT, at=20.0, cached=0)
    assert told.tokens == {
        "unbounded": TOKENS, "capacity": TOKENS, "perfect": 0, "known": 0, "chosen": 0, "delivered": 0,
    }  # fmt: skip


def test_of_several_answers_or_prompts_nobody_told_how_much_of_the_first_was_cached() -> None:
    told = Told()
    told.tell(stored("a", 1, PROMPT, at=1.0))
    told.places("r1", "a", PROMPT, at=20.0, hit=4, answers=3)
    told.ends("r1", "a", at=21.0, cached=3 * TOKENS)
    told.serves("r2", "a", PROMPT, at=40.0, cached=TOKENS)

    assert told.tokens["delivered"] == TOKENS
    assert (told.ladder.figures.ever.untold, told.ladder.figures.ever.requests) == (1, 1)


@pytest.mark.parametrize("end", [given_up("r1", at=2.0), no_instance("r1", at=2.0)])
def test_a_request_that_comes_again_under_another_id_does_not_see_itself(end: LogEvent) -> None:
    told = Told()
    told.places("r1", "a", PROMPT, at=1.0)
    told.tell(end)
    told.places("r2", "b", PROMPT, at=3.0, instead_of=RequestId("r1"))
    told.ends("r2", "b", at=4.0, cached=0)
    assert set(told.tokens.values()) == {0}

    told.serves("r3", "b", PROMPT, at=20.0, cached=0)
    assert told.tokens["unbounded"] == told.tokens["capacity"] == TOKENS


def test_the_best_engine_is_what_its_events_tell() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.tell(stored("a", 1, PROMPT, at=2.0))
    told.serves("r2", "b", PROMPT, at=20.0, cached=0)

    assert told.tokens["perfect"] == told.tokens["known"] == TOKENS
    assert told.tokens["chosen"] == 0


def test_a_late_event_counts_for_what_was_placed_after_its_time() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.places("r2", "b", PROMPT, at=20.0)
    told.tell(stored("a", 1, PROMPT[:3], at=19.0), stored("a", 2, PROMPT[3:], parent=3, at=21.0))
    told.ends("r2", "b", at=22.0, cached=0)

    assert told.tokens["perfect"] == 3 * BLOCK
    assert told.tokens["known"] == 0


def test_a_late_removal_counts_too() -> None:
    told = Told()
    told.tell(stored("a", 1, PROMPT, at=2.0), stored("b", 1, PROMPT[:1], at=2.0))
    told.places("r1", "b", PROMPT, at=20.0, hit=1)
    told.tell(removed("a", 2, PROMPT[1:], at=19.0))
    told.ends("r1", "b", at=22.0, cached=BLOCK)

    assert told.tokens["known"] == TOKENS
    assert told.tokens["perfect"] == BLOCK


def test_an_engine_whose_events_come_later_than_hindsight_waits_changes_nothing() -> None:
    told = Told()
    told.serves("r1", "b", PROMPT, at=1.0, cached=0)
    told.tell(first_token("none", "b", at=3.0 + float(HINDSIGHT_WALL_SECONDS)), stored("a", 1, PROMPT, at=0.5))

    assert told.tokens["perfect"] == 0


def test_a_prompt_on_its_way_through_an_engine_counts_as_held_there() -> None:
    told = Told()
    told.places("r1", "a", PROMPT, at=1.0)
    told.places("r2", "b", PROMPT, at=1.5)
    told.ends("r1", "a", at=2.0, cached=0)
    told.ends("r2", "b", at=2.0, cached=0)

    assert told.tokens["perfect"] == told.tokens["known"] == TOKENS


def test_a_prompt_that_ended_uncomputed_counts_no_more() -> None:
    told = Told()
    told.places("r1", "a", PROMPT, at=1.0)
    told.tell(RequestFailed(at=1.2, request=RequestId("r1"), reason="engine_failed", status=502))
    told.serves("r2", "b", PROMPT, at=1.5, cached=0)

    assert told.tokens["perfect"] == 0
    assert told.tokens["unbounded"] == TOKENS


def test_a_request_that_a_leader_gave_up_counts_if_its_ingress_ends_it() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    for request in ("r2", "r3"):
        told.places(request, "a", PROMPT, at=20.0, hit=len(PROMPT))
        number = 100 + int(request[1])
        told.tell(given_up(request, at=21.0, instance="a", number=number, as_of=told.state.sequence))
    told.ends("r2", "a", at=22.0, cached=TOKENS)

    assert told.tokens["delivered"] == TOKENS


def test_tiers_count_a_request_that_a_leader_gave_up_if_its_ingress_ends_it() -> None:
    told, tiers = Told(), TierCounter()
    placement = replace(told.places("r1", "a", PROMPT, at=1.0, hit=4), loads=[TierTokens("host", 2 * BLOCK)])
    end = told.ends("r1", "a", at=3.0, cached=TOKENS)
    for event in (arrived("r1", at=1.0, prompt_tokens=TOKENS), placement, given_up("r1", at=2.0), end):
        tiers.apply(event)

    assert tiers.tokens == {"device": TOKENS - 2 * BLOCK, "host": 2 * BLOCK}


@pytest.mark.parametrize(("grant_at", "host"), [("a", 2 * BLOCK), ("b", 0)])
def test_a_grant_that_an_ingress_tells_a_new_leader_is_no_choice_of_its_own(grant_at: str, host: int) -> None:
    told, tiers = Told(), TierCounter()
    placement = replace(told.places("r1", "a", PROMPT, at=1.0, hit=4), loads=[TierTokens("host", 2 * BLOCK)])
    grant = RequestGranted(at=2.0, request=RequestId("r1"), instance=InstanceId(grant_at))
    end = told.ends("r1", grant_at, at=3.0, cached=TOKENS)
    for event in (arrived("r1", at=1.0, prompt_tokens=TOKENS), placement, grant, end):
        tiers.apply(event)

    assert tiers.tokens.get("host", 0) == host
    assert sum(tiers.tokens.values()) == TOKENS


def test_what_was_not_delivered_although_nothing_was_removed_was_not_there() -> None:
    told = Told()
    told.tell(stored("a", 1, PROMPT, at=2.0))
    told.serves("r1", "a", PROMPT, at=20.0, cached=TOKENS)
    told.places("r2", "a", PROMPT, at=30.0, hit=4)
    told.ends("r2", "a", at=31.0, cached=BLOCK)

    assert told.tokens["chosen"] == 2 * TOKENS
    assert told.tokens["perfect"] == TOKENS + BLOCK


def test_what_was_removed_while_it_waited_was_there() -> None:
    told = Told()
    told.tell(stored("a", 1, PROMPT, at=2.0))
    told.places("r0", "a", [5], at=19.0)
    told.places("r1", "a", PROMPT, at=20.0, hit=4)
    told.tell(stored("a", 2, [5], at=22.0), removed("a", 3, PROMPT, at=25.0))
    told.ends("r1", "a", at=26.0, cached=0)

    assert told.tokens["perfect"] == TOKENS


def test_a_delivery_of_what_nobody_told_of_raises_the_rungs_that_it_proves() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=2 * BLOCK)

    assert told.tokens["unbounded"] == told.tokens["perfect"] == told.tokens["delivered"] == 2 * BLOCK
    assert told.tokens["capacity"] == 0


def test_the_last_token_is_always_computed() -> None:
    told = Told()
    packed = pack_keys([BlockKey(key) for key in PROMPT])
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.tell(
        arrived("r2", at=20.0, keys=packed, prompt_tokens=TOKENS),
        placed("r2", "a", at=20.0, hit_blocks=4, uncached_tokens=BLOCK),
    )
    told.ends("r2", "a", at=21.0, cached=3 * BLOCK, prompt=TOKENS)

    assert told.tokens["unbounded"] == 3 * BLOCK


def test_one_cache_of_the_fleets_size_drops_what_was_used_longest_ago() -> None:
    told = Told("a", "b", capacity=3 * BLOCK)
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.serves("r2", "b", [11, 12, 13, 14], at=2.0, cached=0)
    told.serves("r3", "b", PROMPT, at=20.0, cached=0)

    assert told.tokens["unbounded"] == TOKENS
    assert told.tokens["capacity"] == 2 * BLOCK


def test_repeats_and_decisions_of_deposed_leaders_change_nothing() -> None:
    told = Told()
    placed = told.places("r1", "a", PROMPT, at=1.0)
    told.tell(placed)
    finished = told.ends("r1", "a", at=2.0, cached=0)
    told.tell(finished, placed)
    told.state.term = Term(2)
    old = Stamp(term=Term(1), number=1, as_of=0)
    told.tell(RequestPlaced(**{name: getattr(placed, name) for name in placed.__struct_fields__} | {"stamp": old}))

    assert told.tokens["unbounded"] == 0
    assert told.ladder.figures.ever.requests == 1


def test_a_request_placed_again_counts_once_and_as_of_its_last_place() -> None:
    told = Told()
    placed = told.places("r1", "a", PROMPT, at=1.0)
    told.tell(stored("b", 1, PROMPT, at=1.5))
    again = {"at": 2.0, "attempt": 2, "instance": InstanceId("b"), "uncached_tokens": 1, "excluded": [InstanceId("a")]}
    told.tell(RequestPlaced(**{name: getattr(placed, name) for name in placed.__struct_fields__} | again))
    told.ends("r1", "b", at=3.0, cached=TOKENS)

    assert told.tokens["known"] == told.tokens["chosen"] == told.tokens["perfect"] == TOKENS
    assert told.ladder.figures.ever.requests == 1


def test_an_engine_that_failed_it_is_not_the_best_any_more() -> None:
    told = Told()
    told.tell(stored("a", 1, PROMPT, at=0.5))
    placed = told.places("r1", "a", PROMPT, at=1.0, hit=4)
    again = {"at": 2.0, "attempt": 2, "instance": InstanceId("b"), "uncached_tokens": TOKENS + 1}
    fields = {name: getattr(placed, name) for name in placed.__struct_fields__}
    told.tell(RequestPlaced(**fields | again | {"excluded": [InstanceId("a")]}))
    told.ends("r1", "b", at=3.0, cached=0)

    assert told.tokens["perfect"] == told.tokens["known"] == 0


def test_generated_blocks_count_as_seen_when_they_come_back() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.tell(stored("a", 1, [*PROMPT, 5], at=3.0))
    told.serves("r2", "b", [*PROMPT, 5, 6], at=20.0, cached=0)

    assert told.tokens["unbounded"] == told.tokens["capacity"] == 5 * BLOCK


def test_an_ingress_that_chose_by_itself_predicted_nothing() -> None:
    told = Told()
    told.places("r1", "a", PROMPT, at=1.0, hit=4)
    told.tell(RequestGranted(at=1.2, request=RequestId("r1"), instance=InstanceId("b")))
    told.ends("r1", "b", at=2.0, cached=0)

    assert told.tokens["chosen"] == 0
    assert told.tokens["known"] == TOKENS


def test_finished_requests_without_cached_tokens_are_only_numbered() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    told.places("r2", "a", PROMPT, at=20.0)
    told.ends("r2", "a", at=21.0, cached=-1)
    told.ladder.settle(told.state)
    tally = told.ladder.figures.ever

    assert (tally.requests, tally.untold, tally.prompt_tokens) == (1, 1, TOKENS + 1)


def test_a_request_is_counted_when_late_events_can_change_it_no_more() -> None:
    told = Told()
    told.serves("r1", "a", PROMPT, at=1.0, cached=0)
    assert told.ladder.figures.ever.requests == 0

    told.tell(stored("b", 1, [9], at=1.1 + float(HINDSIGHT_WALL_SECONDS)))
    assert told.ladder.figures.ever.requests == 1


def test_hours_and_tenants_are_bounded() -> None:
    figures = LadderFigures()
    for number in range(TENANTS_MAX + 50):
        for tally in figures.tallies(0.0, f"tenant-{number}"):
            tally.count(10, [5] * len(Rung))
    assert len(figures.tenants()) == TENANTS_MAX + 1
    assert dict(figures.tenants())[OTHER].requests == 50

    for hour in range(HOURS_MAX + 10):
        for tally in figures.tallies(hour * 3600.0, "tenant-1"):
            tally.count(10, [5] * len(Rung))
    assert [begin for begin, _ in figures.hours()] == [hour * 3600 for hour in range(10, HOURS_MAX + 10)]
    assert len(figures.tallies(0.0, "tenant-1")) == 1, "an hour that is no longer kept"
    assert figures.ever.requests == TENANTS_MAX + 50 + HOURS_MAX + 10


def test_nothing_stays_of_requests_that_ended() -> None:
    told = Told()
    for number in range(200):
        told.serves(f"r{number}", "a", PROMPT, at=float(number), cached=0)
    told.ladder.settle(told.state)
    told.tell(stored("a", 1, PROMPT, at=300.0))
    ladder = told.ladder

    assert not ladder._open
    assert not ladder._due
    assert not ladder._hindsight._holdings
    assert not ladder._hindsight._watching
    assert not ladder._in_flight._blocks
    assert not ladder._in_flight._prompts
    assert not ladder._in_flight._unconfirmed
    assert isinstance(ladder.figures.ever, Tally)


def test_a_log_of_forged_times_names_and_counts_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.analysis.ladder.WATCHED_MAX", 50)
    monkeypatch.setattr("pointsman.analysis.hindsight.WATCHED_MAX", 50)
    told = Told()
    told.places("far", "a", [1, 1, 1, 2], at=1e12, hit=400)
    told.tell(first_token("far", "nobody", at=1e12))
    for number in range(200):
        at = float(number)
        told.places(f"r{number}", "a", [*PROMPT, *PROMPT, number + 100], at=at)
        told.tell(first_token(f"r{number}", f"unknown-{number}", at=at), stored(f"unknown-{number}", 1, [7], at=at))
        told.ends(f"r{number}", f"unknown-{number}", at=at, cached=10**9, prompt=5)
    ladder = told.ladder

    assert len(ladder._due) <= 51
    assert len(ladder._hindsight._holdings) <= 51
    assert len(ladder._in_flight._computed) <= 51
    assert not ladder._hindsight._told
    ladder.settle(told.state)
    assert ladder.figures.ever.tokens[-1] == ladder.figures.ever.prompt_tokens == 200 * 5
    told.ends("far", "a", at=1e12, cached=-1)
    told.ends("nobody", "a", at=1e12, cached=5)
