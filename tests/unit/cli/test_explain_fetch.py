"""What `explain` says of a request that waited for its prefix."""

import pytest

from pointsman.contracts.fleet import InstanceDraining
from pointsman.contracts.requests import PrefixFetchEnded
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.routing.min_ttft import MinTtft
from pointsman.primitives import Epoch, InstanceId, RequestId
from pointsman.state.state import PoolSettings
from pointsman_cli.explain.causes import Cause
from pointsman_cli.explain.diagnosis import verdict
from pointsman_cli.explain.timeline import timeline_of
from tests.support.events import finished, first_token, joined, route, stored
from tests.support.leading import prompt
from tests.support.logged_leader import LoggedLeader


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("", "it waited 4.000 s for 1,280 tokens of its prefix from a"),
        ("not done within 4 s", "it waited 4.000 s for its prefix from a in vain (not done within 4 s)"),
    ],
)
def test_the_wait_for_a_prefix_is_its_cause(failure: str, said: str) -> None:
    pool = LoggedLeader()
    pool.lead(PolicySet(routing=MinTtft(), admission=AdmitAll(), ordering=FirstComeFirstServed()), at=0.0)
    for name in ("a", "b"):
        pool.happens(joined(name, fetches=True, transfer_tokens_per_s=100_000.0))
    pool.happens(stored("a", 1, prompt(1, 20)))
    pool.happens(InstanceDraining(at=0.5, instance=InstanceId("a"), epoch=Epoch(1)))
    pool.decides(pool.dispatcher.route(route("r", [*prompt(1, 20), 900], arrived_at=1.0), 1.0))
    pool.happens(
        PrefixFetchEnded(
            at=5.0, request=RequestId("r"), instance=InstanceId("b"), source=InstanceId("a"),
            tokens=0 if failure else 1280, seconds=4.0, failure=failure,
        )
    )  # fmt: skip
    pool.happens(first_token("r", "b", at=5.1, prefill=0.1))
    pool.happens(finished("r", "b", at=5.2))

    timeline = timeline_of(pool.log, RequestId("r"), PoolSettings())
    told = verdict(timeline)

    assert told.cause is Cause.KV_TRANSFER
    assert said in told.sentence
    assert [phase.kind for phase in timeline.phases if phase.seconds > 0.01] == ["transfer", "engine", "decoding"]
