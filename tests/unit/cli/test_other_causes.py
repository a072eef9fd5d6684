"""Causes beside the five of `test_planted_causes`, each told as a small story: the verdict names it, with its number."""

from collections.abc import Callable
from itertools import chain

import pytest

from pointsman.contracts.cache import CacheCleared
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import InstanceDraining
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.primitives import Epoch, InstanceId, RequestId, Tenant
from pointsman.simulation.replay import pool_settings
from pointsman_cli.explain.causes import Cause, Verdict, cause_ahead
from pointsman_cli.explain.diagnosis import reasons_and_details, verdict
from pointsman_cli.explain.timeline import timeline_of
from pointsman_cli.explain.values import RequestTimeline
from tests.support.events import finished, route, stored
from tests.support.request_story import RequestStory
from tests.support.slow_log import read_late


def about(story: RequestStory, request: str) -> RequestTimeline:
    return timeline_of(story.log, RequestId(request), pool_settings(story.log))


def of(story: RequestStory, request: str) -> Verdict:
    return verdict(about(story, request))


@pytest.mark.parametrize(
    ("longest", "ahead", "less_busy", "alike", "cause"),
    [
        (6.0, 8.0, False, 0.0, Cause.LONG_PROMPT_AHEAD),
        (6.0, 20.0, False, 0.0, Cause.OVERLOAD),  # one of several
        (2.0, 2.0, False, 0.0, Cause.OVERLOAD),  # not long: less than half of the objective
        (2.0, 9.0, True, 0.5, Cause.HOT_PREFIX),
        (2.0, 9.0, True, 0.4, Cause.BUSY_INSTANCE),
    ],
)
def test_what_was_ahead_is_one_long_prompt_a_crowd_or_a_crowd_that_need_not_have_been(
    longest: float, ahead: float, less_busy: bool, alike: float, cause: Cause
) -> None:
    assert cause is cause_ahead(
        longest=longest, ahead=ahead, objective=10.0, less_busy=less_busy, hot=True, alike=alike
    )


def test_failed_attempts_name_the_engine_what_it_did_and_the_time_lost() -> None:
    story = RequestStory()
    assert story.asks("slow") == "a"
    story.later(6.0)
    story.attempt_fails("slow", "first_byte_timeout")
    assert story.again("slow", attempt=2, excluded="a") == "b"
    story.answers("slow", after=0.257)
    told = of(story, "slow")

    assert told.cause == "failed_attempts"
    assert told.sentence == "slow because a failed it (its first byte did not come in time): 6.000 s were lost"
    assert (
        "6.000 s were lost (96% of the wait) until it was placed again, on b"
        in reasons_and_details(about(story, "slow"))[0][0]
    )


def test_a_request_that_every_engine_failed_names_them() -> None:
    story = RequestStory()
    story.asks("lost")
    story.later(1.0)
    story.attempt_fails("lost", "http_5xx")
    story.again("lost", attempt=2, excluded="a")
    story.later(1.0)
    story.attempt_fails("lost", "stream_reset", attempt=2)
    story.fails("lost")
    told = of(story, "lost")

    assert told == Verdict(told.cause, "failed because 2 engines failed it, at last b: its answer broke off")
    assert told.cause == "failed_attempts"


def test_a_wait_for_a_scheduler_is_told_in_seconds() -> None:
    story = RequestStory()
    story.asks("waited", waited=7.5, held_up=7.4)
    story.answers("waited", after=0.257)
    told = of(story, "waited")

    assert (told.cause, told.sentence) == ("no_scheduler", "slow because no scheduler answered for 7.400 s")


def test_an_ingress_that_chose_alone_says_that_no_scheduler_answered() -> None:
    story = RequestStory()
    story.later(8.0)
    story.happens(RequestGranted(at=story.now, request=RequestId("alone"), instance=InstanceId("a")))
    story.later(0.5)
    story.happens(finished("alone", "a", at=story.now, e2e=6.5, prompt_tokens=100, ttft=6.5))
    told = of(story, "alone")

    assert (told.cause, told.sentence) == ("no_scheduler", "slow because no scheduler answered for 6.000 s")


def test_a_request_that_no_instance_could_take_says_for_how_long() -> None:
    story = RequestStory(engines="", policies=policy_set(routing="round_robin", admission="none", hold_seconds=600.0))
    story.asks("held")
    story.later(9.0)
    story.joins("a")
    story.answers("held", after=0.257)
    told = of(story, "held")

    assert (told.cause, told.sentence) == ("no_instance", "slow because no instance could take it for 9.000 s")


def test_a_request_that_was_moved_says_where_it_waited_and_behind_what() -> None:
    story = RequestStory(policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100))
    assert [story.asks("long", 100), story.asks("short"), story.asks("moved", slo_ttft=6.6)] == ["a", "b", "a"]
    story.answers("short", after=0.257)
    story.later(6.0)
    move = Migration(RequestId("moved"), InstanceId("a"), InstanceId("b"), 5.0, "b is idle")
    plan = MigrationPlan(id="p1", policy="longest_wait", as_of=story.state.sequence, migrations=(move,))
    story.decides(story.dispatcher.migrate(plan, story.now))
    assert story.where("moved") == "b"
    story.answers("moved", after=0.5)
    told = of(story, "moved")

    assert told.cause == "moved"
    assert told.sentence == "slow because it waited 6.257 s at a behind 6,401 tokens before it was moved to b"


def test_a_move_that_came_too_late_and_was_refused_is_in_no_first_line() -> None:
    story = RequestStory(policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100))
    story.asks("long", 100)
    story.asks("short")
    story.asks("behind")
    story.answers("short", after=0.257)
    story.later(6.144)
    story.begins("long")
    move = Migration(RequestId("behind"), InstanceId("a"), InstanceId("b"), 5.0, "b is idle")
    plan = MigrationPlan(id="p1", policy="longest_wait", as_of=story.state.sequence, migrations=(move,))
    story.decides(story.dispatcher.migrate(plan, story.now))
    story.answers("behind", after=0.257)
    timeline = about(story, "behind")
    told = verdict(timeline)

    assert timeline.refused
    assert told.cause == "long_prompt_ahead"
    assert told.sentence == "slow because 6,401 tokens were ahead of it on a, of one long prompt"
    sentences = list(chain(*reasons_and_details(timeline)))
    assert next(n for n, sentence in enumerate(sentences) if "requested a move" in sentence) >= 2


def test_time_in_the_queue_is_not_called_an_unusual_pace() -> None:
    """One prefill before it stood still; its own took what it takes."""
    story = RequestStory(
        engines="a", policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100)
    )
    for number in range(30):
        story.asks(f"r{number}", 4)
    story.answers("r0", after=30.0)
    for number in range(1, 30):
        story.answers(f"r{number}", after=0.257)
    timeline = about(story, "r29")
    text = " ".join(chain(*reasons_and_details(timeline)))

    assert verdict(timeline).cause == "slow_engine"
    assert "unusual" not in text


def test_an_engine_without_a_free_place_says_how_many_it_has() -> None:
    story = RequestStory(engines="a", policies=policy_set(routing="round_robin", admission="none", running_max=2))
    for request in ("one", "two"):
        story.asks(request)
        story.later(0.257)
        story.begins(request)
    story.asks("third")
    story.later(20.0)
    story.ends("one", ttft=0.257)
    story.answers("third", after=0.257)
    told = of(story, "third")

    assert told.cause == "engine_full"
    assert told.sentence == "slow because the 2 places of a were taken, 2 by requests that were decoding"


def test_requests_that_came_later_and_went_first_are_counted() -> None:
    story = RequestStory(
        engines="a",
        policies=policy_set(
            routing="round_robin", admission="none", ordering="shortest_prefill", prefill_window_tokens=64
        ),
    )
    story.asks("first", 2)
    story.asks("overtaken", 20)
    for number in range(40):
        story.asks(f"r{number}", 4)
    story.answers("first", after=0.129)
    for number in range(40):
        story.answers(f"r{number}", after=0.257)
    story.answers("overtaken", after=1.281)
    told = of(story, "overtaken")

    assert told.cause == "overtaken"
    assert "40 requests with 10,280 tokens came later and went first" in told.sentence
    assert "shortest_prefill" in told.sentence


def test_tokens_that_come_slowly_are_told_with_both_times() -> None:
    story = RequestStory()
    story.asks("dripping")
    story.later(0.257)
    story.begins("dripping")
    story.later(9.0)
    story.ends("dripping", ttft=0.257, tokens=61, tpot=0.15)
    told = of(story, "dripping")

    assert told.cause == "slow_decode"
    assert told.sentence == "first token in time, but its tokens came from a every 150 ms, 100 ms were wanted"


@pytest.mark.parametrize(("tpot", "slow"), [(0.029, True), (0.019, False)])
def test_the_tokens_of_several_answers_come_side_by_side(tpot: float, slow: bool) -> None:
    story = RequestStory()
    story.asks("four", answers=4)
    story.later(0.257)
    story.begins("four")
    story.later(9.0)
    story.ends("four", ttft=0.257, tokens=244, tpot=tpot)
    told = of(story, "four")

    assert ("a every 117 ms, 100 ms were wanted" in told.sentence) == (told.cause == "slow_decode") == slow


@pytest.mark.parametrize(
    ("delay", "cause", "sentence"),
    [
        (0.0, "slow_engine", "slow because a was slow: it took 31.9 times what its cost model says"),
        (4.0, "log_slow", "slow because the log was slow: 7.000 s more went by than a had work"),
    ],
)
def test_a_leader_that_reads_a_slow_log_makes_no_engine_slow(delay: float, cause: str, sentence: str) -> None:
    """It decides once a second."""
    story = RequestStory()
    story.later(4.0)
    story.asks("slow")
    for second in range(8):
        story.later(1.0)
        story.asks(f"other-{second}", 0)
    story.answers("slow", after=0.2)
    log = read_late(story.log, 104.5, 111.5, delay)
    told = verdict(timeline_of(log, RequestId("slow"), pool_settings(log)))

    assert (told.cause, told.sentence) == (cause, sentence)


def test_an_answer_that_is_not_streamed_says_that_it_waited_for_its_end() -> None:
    story = RequestStory()
    story.asks("whole", streaming=False)
    story.later(12.0)
    story.ends("whole", tokens=400)
    told = of(story, "whole")

    assert (told.cause, told.sentence) == (
        "whole_answer", "slow because it was not streamed: its 400 tokens had to be written before the answer",
    )  # fmt: skip


def test_a_whole_answer_in_a_split_pool_does_not_count_as_the_transfer_of_its_cache() -> None:
    story = RequestStory(engines="")
    story.joins("p", role="prefill")
    story.joins("d", role="decode")
    story.asks("whole", streaming=False)
    story.later(0.3)
    command = HandOverRequest(request=RequestId("whole"), attempt=1, instance=InstanceId("p"), prefill=0.3)
    story.decides(story.dispatcher.hand_over(command, story.now))
    story.later(60.0)
    story.ends("whole", tokens=400)
    told = of(story, "whole")

    assert told.cause == "whole_answer"
    assert told.sentence == (
        "slow because it was not streamed: its 400 tokens had to be written before the answer, 150.1 ms each where "
        "100.0 ms were wanted"
    )


@pytest.mark.parametrize(
    ("ended", "cause", "because"),
    [
        (CancelCause.CLIENT_GONE, "client_gone", "the client left"),
        (CancelCause.TIMEOUT, "cancelled", "its time limit ended"),
        (CancelCause.INGRESS_STOPPED, "cancelled", "its ingress stopped"),
    ],
)
def test_a_request_that_was_cancelled_is_told_with_what_it_waited_for(
    ended: CancelCause, cause: str, because: str
) -> None:
    story = RequestStory(
        engines="a", policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100)
    )
    story.asks("long", 300)
    story.asks("left")
    story.later(9.0)
    story.is_cancelled("left", ended)
    told = of(story, "left")

    assert told.cause == cause
    assert told.sentence.startswith(f"cancelled because {because} after 9.000 s, before its first token")
    assert "19,201 tokens were ahead of it on a" in told.sentence


def test_a_request_beyond_its_tenants_limit_says_which() -> None:
    story = RequestStory()
    limits = TenantPolicies(tenants={Tenant("t"): TenantPolicy(concurrency=1)})
    story.decides(story.dispatcher.set_tenant_policies(limits, story.now, by="op"))
    story.asks("first")
    story.asks("second")
    told = of(story, "second")

    assert told.cause == "limit"
    assert told.sentence.startswith("rejected because it was beyond its tenant's limit: ")


def test_a_request_that_was_rejected_for_a_prompt_ahead_says_so() -> None:
    story = RequestStory(engines="a", policies=policy_set(routing="min_ttft", admission="predicted_ttft"))
    story.asks("long", 300, slo_ttft=60.0)
    story.asks("refused")
    told = of(story, "refused")

    assert told.cause == "long_prompt_ahead"
    assert told.sentence.startswith(
        "rejected because 19,201 tokens were ahead of it on a, of one long prompt (19.5 s predicted"
    )


def test_a_rejection_although_an_engine_was_idle_is_no_overload() -> None:
    limited = policy_set(routing="min_ttft", admission="predicted_ttft", settings={"admission.hard_limit": True})
    story = RequestStory(policies=limited)
    prompt = list(range(300))
    for name, objective in (("first", 60.0), ("twin", 5.0)):  # the twin would wait for the first one's prefix
        command = route(name, prompt, arrived_at=story.now, slo_ttft=objective)
        story.decides(story.dispatcher.route(command, story.now))
    story.asks("held up", waited=6.0, slo_ttft=5.0)
    twin, late = of(story, "twin"), of(story, "held up")

    assert twin.cause == "long_prompt"
    assert twin.sentence == ("rejected because its prompt takes longer than its objective: 19.2 s on b, which was idle")
    assert late.cause == "transport"
    assert late.sentence.startswith("rejected because too much of its objective had gone by before: it takes 0.2")


def test_without_an_instance_a_rejection_says_so() -> None:
    story = RequestStory(engines="")
    story.asks("nowhere")
    told = of(story, "nowhere")

    assert told.cause == "no_instance"
    assert "no instance" in told.sentence


def test_an_engine_whose_cache_nobody_knows_is_told() -> None:
    story = RequestStory(engines="")
    story.joins("a", cache="no_events")
    story.asks("blind", 60)
    story.answers("blind", after=3.841)
    timeline = about(story, "blind")

    assert verdict(timeline).cause == "nothing"
    assert any("no KV events" in sentence for sentence in reasons_and_details(timeline)[0])


def test_blocks_that_were_evicted_while_it_waited_are_no_stale_index() -> None:
    story = RequestStory(
        engines="a", policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100)
    )
    story.asks("warm", 80)
    story.later(5.121)
    story.happens(stored("a", 1, [1_000_000 + n for n in range(80)], at=story.now))
    story.begins("warm")
    story.ends("warm")
    story.asks("other", 2)
    story.prompts = 0
    assert story.asks("again", 80) == "a"
    story.happens(CacheCleared(at=story.now, instance=InstanceId("a"), epoch=Epoch(1), sequence=2))
    story.answers("other", after=0.129)
    story.later(5.121)
    story.begins("again")
    story.ends("again", cached=0)
    told = of(story, "again")

    assert told.cause == "evicted"
    assert "5,120 tokens expected in the cache of a were not there when it was granted" in told.sentence


@pytest.mark.parametrize("gone", ["a", "b"])
def test_every_request_of_a_story_has_a_verdict_while_it_goes_on(gone: str) -> None:
    """A log that ends anywhere: no request makes the verdict raise."""
    story = RequestStory(policies=policy_set(routing="round_robin", admission="none", prefill_window_tokens=100))
    steps: list[Callable[[], object]] = [
        lambda: story.asks("one", 100), lambda: story.asks("two"), lambda: story.later(0.3), lambda: story.begins("two"),
        lambda: story.asks("three"), lambda: story.ends("two", ttft=0.3), lambda: story.later(7.0),
        lambda: story.happens(InstanceDraining(at=story.now, instance=InstanceId(gone), epoch=Epoch(1), reason="x", leaving=True)),
        lambda: story.decides(story.dispatcher.relocate_pending(story.now)), lambda: story.begins("one"),
    ]  # fmt: skip
    for step in steps:
        step()
        for request in {e.event.request for e in story.log if isinstance(e.event, RequestArrived)}:
            timeline = about(story, request)
            assert verdict(timeline).sentence
            assert len(reasons_and_details(timeline)[0]) <= 7
