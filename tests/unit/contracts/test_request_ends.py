"""Which of several ends of a request counts."""

from pointsman.contracts.decisions import RequestEnd, counts_as_end, is_final_end
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestCancelled, RequestFailed
from pointsman.primitives import RequestId
from tests.support.events import finished, first_token, given_up

FIRST, ANSWERED, LOST = given_up("r", at=1.0), finished("r", "a", at=2.0), given_up("r", at=3.0)
FAILED = RequestFailed(at=2.0, request=RequestId("r"), reason="engine", status=502)
LEFT = RequestCancelled(at=2.0, request=RequestId("r"), reason="", cause=CancelCause.CLIENT_GONE)


def test_the_first_end_counts_and_only_an_ingress_takes_back_what_a_leader_gave_up() -> None:
    ends: list[RequestEnd] = [FIRST, ANSWERED, FAILED, LEFT]

    assert all(counts_as_end(end, None) for end in ends)
    assert [counts_as_end(end, FIRST) for end in (*ends[1:], LOST)] == [True, True, True, False]
    assert not any(counts_as_end(later, end) for end in ends[1:] for later in (*ends, LOST))
    assert not counts_as_end(first_token("r", "a", at=2.0), FIRST)


def test_every_end_but_a_give_up_is_final() -> None:
    told = [is_final_end(event) for event in (ANSWERED, FAILED, LEFT, FIRST, first_token("r", "a", at=2.0))]

    assert told == [True, True, True, False, False]
