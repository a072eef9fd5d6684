"""A best-effort request whose prefix was cached while it waited needs no turn, unless another would be late by it."""

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced
from pointsman.policies.admission.predicted_ttft import PredictedTtft
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.primitives import InstanceId, RequestId, Tenant
from pointsman.state.state import FOLD_VERSION, PoolSettings
from tests.support.events import finished, first_token, route, stored
from tests.support.leading import leader_of

ENGINE = InstanceId("a")
EARLIER = range(20_000, 20_150)
DOCUMENT = range(30_000, 30_150)
"""9.6 s of prefill, of an objective of 5 s."""
QUESTION = range(40_000, 40_003)
"""0.193 s behind the document."""


def pool(*, window: int = 1, fold_version: int = FOLD_VERSION) -> Dispatcher:
    """One engine, which computes a document until 9.6."""
    policies = PolicySet(
        routing=RoundRobin(),
        admission=PredictedTtft(),
        ordering=FirstComeFirstServed(),
        prefill_window_tokens=window,
    )
    leader = leader_of((ENGINE,), policies, settings=PoolSettings(fold_version=fold_version))
    ask(leader, "earlier", list(EARLIER))
    return leader


def engine_at_work(fold_version: int, objectives: dict[str, float]) -> Dispatcher:
    """It takes one prompt at once. Another document waits, a question about that, and others of 0.128 s with these objectives.
    It is nobody's turn before 10.1."""
    leader = pool(fold_version=fold_version)
    document, question = (
        ask(leader, name, keys) for name, keys in (("document", list(DOCUMENT)), ("question", [*DOCUMENT, *QUESTION]))
    )
    assert document.best_effort
    assert question.best_effort
    assert question.prefill_seconds == pytest.approx(0.193)
    for number, (name, objective) in enumerate(objectives.items()):
        assert not ask(leader, name, [1000 * number + 1, 1000 * number + 2], slo_ttft=objective).best_effort
    return leader


def ask(leader: Dispatcher, name: str, keys: list[int], *, slo_ttft: float = 5.0) -> RequestPlaced:
    events = leader.route(route(name, keys, tenant=Tenant("reader"), slo_ttft=slo_ttft), 0.0)
    return next(event for event in events if isinstance(event, RequestPlaced))


def granted(events: list[LogEvent]) -> list[RequestId]:
    return [event.request for event in events if isinstance(event, RequestGranted)]


@pytest.mark.parametrize(
    ("objectives", "at", "expected"),
    [
        ({"one": 20.0}, 9.6, "question"),
        ({"one": 9.8}, 9.6, "one"),
        ({"one": 9.75}, 9.65, "question"),
        ({"one": 9.95, "two": 10.1}, 9.6, "question"),
        ({"one": 9.95, "two": 10.0}, 9.6, "one"),
    ],
    ids=["none is late", "one would be late", "one is late anyway", "none of two", "the second would be late"],
)
def test_it_goes_first_where_it_makes_no_other_late(objectives: dict[str, float], at: float, expected: str) -> None:
    leader = engine_at_work(FOLD_VERSION, objectives)

    assert next_granted(leader, list(DOCUMENT), at=at) == [expected]


@pytest.mark.parametrize(
    ("fold_version", "blocks", "expected"), [(19, 150, "question"), (18, 150, "one"), (19, 149, "one"), (19, 0, "one")]
)
def test_it_waits_for_its_turn_before_all_that_it_counted_on_is_cached(
    fold_version: int, blocks: int, expected: str
) -> None:
    leader = engine_at_work(fold_version, {"one": 20.0})

    assert next_granted(leader, list(DOCUMENT)[:blocks], at=9.6) == [expected]


def next_granted(leader: Dispatcher, cached: list[int], *, at: float) -> list[RequestId]:
    """Once the engine has computed what it had. The document waits, though it is cached: its placement counted on nothing."""
    leader.state.apply(stored(ENGINE, 1, cached))
    leader.state.apply(first_token("earlier", ENGINE, at=at))
    leader.state.apply(finished("earlier", ENGINE, at=at))
    return granted(leader.grant_waiting(ENGINE, at))


def test_what_is_still_computed_is_not_cached() -> None:
    leader = pool(window=100_000)
    question = ask(leader, "question", [*EARLIER, *QUESTION])

    assert question.best_effort
    assert question.prefill_seconds == pytest.approx(0.193)
    assert granted(leader.grant_waiting(ENGINE, 1.0)) == []
    leader.state.apply(stored(ENGINE, 1, list(EARLIER)))
    assert granted(leader.grant_waiting(ENGINE, 1.0)) == ["question"]
