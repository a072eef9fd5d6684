"""Where a KV cache should have come from another engine, that engine may be why a request failed."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import pytest
from typing_extensions import override

from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.fleet import DecodeCost, InstanceEjected
from pointsman.contracts.requests import AttemptFailure, RequestAttemptFailed
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.fleet import Status
from tests.support.events import finished, first_token, joined, route
from tests.support.failing_pool import PREFILL, FailingPool

COST = DecodeCost(step_s=0.02, per_request_s=0.02)


@dataclass
class SplitPool(FailingPool):
    """`engines`: those that begin with p prefill, the others decode."""

    engines: str = "p1 p2 d1 d2 d3"

    @override
    def __post_init__(self) -> None:
        self.lead(self.policies, at=self.now)
        for name in self.engines.split():
            self.joins(name)

    def joins(self, name: str, *, epoch: int = 1) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        told = {"role": role, "decode": COST, "transfer_tokens_per_s": 1e6}
        self.happens(joined(name, at=self.now, epoch=epoch, **told))

    def hands_over(
        self, *, request: str = "", attempt: int = 1, excluded: Iterable[str] = (), prefill: float = PREFILL
    ) -> tuple[str, str, str]:
        """A request that is prefilled and handed over: its name, where it was prefilled, and where it is decoded."""
        if not request:
            self.numbers += 1
            request = f"r{self.numbers}"
        left_out = [InstanceId(name) for name in excluded]
        command = route(request, [self.numbers], arrived_at=self.now, attempt=attempt, excluded=left_out, slo_tpot=10.0)
        self.decides(self.dispatcher.route(command, self.now))
        prefilled_by = self.at_of(request)
        self.later(PREFILL)
        told = HandOverRequest(request=RequestId(request), attempt=attempt, instance=prefilled_by, prefill=prefill)
        self.decides(self.dispatcher.hand_over(told, self.now))
        return request, prefilled_by, self.at_of(request)

    def gets_no_cache(
        self, request: str, prefilled_by: str, instance: str, *, attempt: int = 1, failure: AttemptFailure = "http_5xx"
    ) -> None:
        self.later(0.01)
        self.happens(
            RequestAttemptFailed(
                at=self.now, request=RequestId(request), instance=InstanceId(instance), attempt=attempt,
                failure=failure, status=500, prefilled_by=InstanceId(prefilled_by),
            )
        )  # fmt: skip

    def decodes(self, request: str, instance: str) -> None:
        self.later(0.02)
        self.happens(first_token(request, instance, at=self.now, prefill=0.02))
        self.happens(finished(request, instance, at=self.now))

    def hands_over_to(self, prefilled_by: str, instance: str, *, prefill: float = PREFILL) -> tuple[str, str, str]:
        """The same between these two. An engine that is not ready is replaced by any other."""
        taken = {name for name in (prefilled_by, instance) if self.status(InstanceId(name)) == (Status.READY, False)}
        kinds = {name[0] for name in taken}
        others = [name for name in self.engines.split() if name[0] in kinds and name not in taken]
        return self.hands_over(excluded=others, prefill=prefill)

    def serve_pairs(self, rounds: int, *, sick: str) -> list[InstanceId]:
        """So many requests at each pair of engines, one after the other. Where `sick` has a part in it, a request fails and goes
        elsewhere. Who was ejected."""
        for pair in [*product(("p1", "p2"), ("d1", "d2", "d3"))] * rounds:
            request, prefilled_by, instance = self.hands_over_to(*pair)
            if sick in (prefilled_by, instance):
                self.gets_no_cache(request, prefilled_by, instance)
                _, _, instance = self.hands_over(request=request, attempt=2, excluded={prefilled_by, instance})
            self.decodes(request, instance)
            self.look()
        return [ejection.instance for ejection in self.ejections()]


@pytest.mark.parametrize("sick", ["p1", "p2", "d1", "d2", "d3"])
def test_of_two_engines_between_which_no_cache_came_the_sick_one_is_ejected(sick: str) -> None:
    pool = SplitPool()

    assert set(pool.serve_pairs(8, sick=sick)) == {sick}
    assert pool.proven


def test_a_prefill_engine_is_ejected_because_others_got_no_cache_of_it() -> None:
    pool = SplitPool()
    pool.serve_pairs(8, sick="p1")

    assert pool.ejections()[0].detail == "5 requests in a row failed there: d3 got no KV cache of it: 500 http_5xx"


@pytest.mark.parametrize("sick", ["p1", "d1"])
def test_of_two_engines_that_always_work_together_the_one_that_said_that_it_failed_is_tried_first(sick: str) -> None:
    """Its ejection parts them."""
    pool = SplitPool()
    for _ in range(12):
        request, prefilled_by, instance = pool.hands_over_to("p1", "d1")
        if sick in (prefilled_by, instance):
            pool.gets_no_cache(request, prefilled_by, instance)
            _, _, instance = pool.hands_over(request=request, attempt=2, excluded={prefilled_by, instance})
        pool.decodes(request, instance)
        pool.look()

    assert [ejection.instance for ejection in pool.ejections()] == (["d1", "p1"] if sick == "p1" else ["d1"])


def test_a_connection_that_a_decode_engine_refuses_is_never_the_fault_of_the_prefill() -> None:
    pool = SplitPool()
    request, prefilled_by, instance = pool.hands_over()
    pool.gets_no_cache(request, prefilled_by, instance, failure="connect_failure")

    records = {name: pool.state.outliers.record(InstanceId(name)) for name in (prefilled_by, instance)}
    assert (records[prefilled_by].suspected, records[instance].in_a_row) == (0, 1)


def test_an_engine_that_also_prefilled_for_the_one_that_answers_is_cleared() -> None:
    pool = SplitPool()
    request, _, first = pool.hands_over_to("p1", "d1")
    pool.gets_no_cache(request, "p1", first)
    _, prefilled_by, second = pool.hands_over(request=request, attempt=2, excluded=["p2", "d1"])
    pool.state.outliers.record(InstanceId("p1")).suspected = 100
    pool.decodes(request, second)

    assert prefilled_by == "p1"
    records = {name: pool.state.outliers.record(InstanceId(name)) for name in ("p1", "d1")}
    assert (records["p1"].in_a_row, records["d1"].in_a_row) == (0, 1)


def test_what_an_engine_was_suspected_of_before_it_served_is_forgotten() -> None:
    pool = SplitPool()
    for decoder in ("d1", "d2", "d3"):
        pool.gets_no_cache(pool.hands_over_to("p1", decoder)[0], "p1", decoder)
    for decoder in ("d1", "d2", "d3"):
        pool.decodes(pool.hands_over_to("p1", decoder)[0], decoder)
    request, _, _ = pool.hands_over_to("p1", "d1")
    pool.gets_no_cache(request, "p1", "d1")
    pool.gives_up(request)

    records = {name: pool.state.outliers.record(InstanceId(name)) for name in ("p1", "d1")}
    assert (records["p1"].in_a_row, records["d1"].in_a_row) == (0, 1)


@pytest.mark.parametrize("read_first", ["failure", "retry"])
def test_an_engine_that_has_restarted_since_its_prefill_is_not_suspected(read_first: str) -> None:
    pool = SplitPool()
    request, _, _ = pool.hands_over_to("p1", "d1")
    pool.joins("p1", epoch=2)
    if read_first == "failure":
        pool.gets_no_cache(request, "p1", "d1")
    _, _, second = pool.hands_over(request=request, attempt=2, excluded=["p1", "d1"])
    if read_first == "retry":
        pool.gets_no_cache(request, "p1", "d1")
    pool.decodes(request, second)

    records = {name: pool.state.outliers.record(InstanceId(name)) for name in ("p1", "d1")}
    assert (records["p1"].suspected, records["d1"].in_a_row) == (0, 1)


def test_an_engine_that_has_prefilled_nothing_of_a_request_has_not_served_it() -> None:
    """The prompt could not be split: all was computed by who decodes."""
    pool = SplitPool()
    for prefill, served in ((PREFILL, 1), (0.0, 1)):
        request, _, instance = pool.hands_over_to("p1", "d1", prefill=prefill)
        pool.decodes(request, instance)

        assert sum(t.served for t in pool.state.outliers.record(InstanceId("p1")).tallies.values()) == served


@pytest.mark.parametrize("ends", [True, False])
def test_a_failure_accuses_the_same_engine_where_no_other_has_answered_yet(ends: bool) -> None:
    """The request ends unserved, or runs on elsewhere."""
    pool = SplitPool()
    for decoder in ("d1", "d2", "d3") * 2:
        request, _, _ = pool.hands_over_to("p1", decoder)
        pool.gets_no_cache(request, "p1", decoder)
        if ends:
            pool.gives_up(request)
        else:
            pool.hands_over(request=request, attempt=2, excluded=["p1", decoder])
    pool.later(0.6)

    assert [event.instance for event in pool.look() if isinstance(event, InstanceEjected)] == ["p1"]
