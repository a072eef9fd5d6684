"""A shadow policy decides each request from what its leader knew: the same policy agrees always, another one decides what a
leader with that policy would have decided."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest
from typing_extensions import override

from pointsman.analysis.shadow import Shadow, shadow_choice
from pointsman.analysis.shadow_decisions import DecisionShadows
from pointsman.analysis.shadow_figures import ShadowDecision
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import LeaderElected, RequestPlaced, RequestRejected
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId
from pointsman.state.state import State
from tests.support.events import BLOCK, route
from tests.support.recorded_log import SETTINGS, RecordedFleet

Answer = RequestPlaced | RequestRejected
OTHERS = ("round_robin", "d2lpm", "preble", "random:seed=7", "pointsman:displaced_max=0.1,order=edf")
UNUSUAL = [("split", "d2lpm"), ("failing", "preble"), ("limited", "random:seed=7"), ("failing", "round_robin")]
WORLDS = {
    "plain": {},
    "split": {"roles": ("prefill", "prefill", "decode", "both")},
    "failing": {"failing": True},
    "limited": {"limited": True},
    "fetching": {"fetching": True},
}


def followed(entries: Iterable[LogEntry], *texts: str) -> DecisionShadows:
    state = State(SETTINGS)
    shadows = DecisionShadows([shadow_choice(text).change for text in texts], state, None)
    for shadow in shadows.shadows:
        shadow.differences = []  # type: ignore[assignment] # all of them
    for entry in entries:
        state.apply_entry(entry)
        shadows.apply(entry)
    shadows.finish()
    return shadows


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("policy", ["pointsman", "d2lpm", "round_robin"])
def test_the_policy_in_force_agrees_with_itself_beside_others(policy: str, world: str) -> None:
    fleet = RecordedFleet(policy_set(routing=policy), seed=5, **WORLDS[world]).live(500).write_all()  # type: ignore[arg-type]

    itself, *others = followed(fleet.entries, policy, *OTHERS[:3]).shadows

    total = itself.total
    assert (itself.problem, itself.failed, total.decided > 40) == ("", 0, True), itself.failure
    assert not itself.differences
    assert total.same + total.both_reject == total.decided
    assert total.shadow_predicted_ttft == total.running_predicted_ttft > 0
    assert total.shadow_cached_tokens == total.running_cached_tokens > 0
    assert any(other.differences for other in others)


@pytest.mark.parametrize("policy", ["pointsman", "d2lpm", "lbgr"])
def test_it_agrees_when_requests_make_room_for_others_and_after_takeovers(policy: str) -> None:
    policies = replace(policy_set(routing=policy, ordering="edf"), pending_max=4, prefill_window_tokens=64)
    fleet = RecordedFleet(policies, seed=11, limited=True).live(400)
    fleet.take_over()
    fleet.live(400).write_all()
    displaced = [e for e in fleet.entries if isinstance(e.event, RequestRejected) and e.event.displaced_by]

    itself = followed(fleet.entries, policy).shadows[0]

    assert displaced
    assert itself.total.decided > 100
    assert not itself.differences


@pytest.mark.parametrize(("world", "other"), [*(("plain", other) for other in OTHERS), *UNUSUAL])
def test_it_decides_what_a_leader_with_that_policy_would_have_decided(world: str, other: str) -> None:
    policies = policy_set(routing="pointsman")
    fleet = RecordedFleet(policies, seed=3, **WORLDS[world]).live(220).write_all()  # type: ignore[arg-type]

    shadow = followed(fleet.entries, other).shadows[0]

    expected = reference(fleet.entries, policies, other)
    assert len(expected) > 20
    assert shadow.total.decided == len(expected)
    differing = {key: instance for key, (instance, chosen) in expected.items() if instance != chosen}
    assert {(d.request, d.sequence): d.shadow_instance for d in shadow.differences} == differing


def reference(entries: list[LogEntry], running: PolicySet, other: str) -> dict[tuple[RequestId, int], tuple[str, str]]:
    """What a leader with the other policy answers, and what was answered; a fresh fold for each decision, slowly."""
    change = shadow_choice(other).change
    policies = policy_set(
        routing=change.policy or "",
        ordering=change.ordering or running.ordering.name,
        settings={text.partition("=")[0].removeprefix("routing."): text.partition("=")[2] for text in change.texts},
    )
    elected = next(entry for entry in entries if isinstance(entry.event, LeaderElected))
    own = [e for e in entries if e.event is not None and e.event.stamp is not None]
    rest = [e for e in entries[elected.sequence :] if e.event is None or e.event.stamp is None]
    own.sort(key=lambda entry: entry.event.stamp.number)  # type: ignore[union-attr]
    found = {}
    for place, entry in enumerate(own):
        answer = entry.event
        if not isinstance(answer, Answer) or (isinstance(answer, RequestRejected) and answer.displaced_by):
            continue
        arrival = own[place - 1].event
        is_new = isinstance(arrival, RequestArrived) and arrival.request == answer.request
        if is_new and arrival is not None and arrival.stamp is not None and answer.stamp is not None:
            is_new = (arrival.at, arrival.stamp.as_of) == (answer.at, answer.stamp.as_of)
        before = own[: place - 1] if is_new else own[:place]
        state = leader_state(entries[: elected.sequence], before, rest, own[place], policies)
        request = state.workload.requests.get(answer.request)
        if is_new:
            assert isinstance(arrival, RequestArrived)
            command = msgspec.convert(arrival, RouteRequest, from_attributes=True)
        elif request is not None and request.over_limit is None:
            command = RouteRequest(
                request=request.id, ingress="", arrived_at=request.arrived_at, tenant=request.tenant, keys=b"",
                prompt_tokens=request.prompt_tokens, max_output_tokens=request.max_output_tokens,
                slo_ttft=request.slo_ttft, slo_tpot=request.slo_tpot,
            )  # fmt: skip
        else:
            continue
        command = msgspec.structs.replace(command, attempt=answer.attempt, excluded=answer.excluded)
        assert answer.stamp is not None
        leader = Dispatcher(state, policies, term=answer.stamp.term)
        leader.decided = answer.stamp.number - 1 - is_new
        decided = leader.route(command, answer.at)
        given = next(e for e in decided if isinstance(e, Answer) and e.request == answer.request)
        if isinstance(given, RequestRejected) and given.policy == "tenant_limits":
            continue
        found[answer.request, entry.sequence] = (getattr(given, "instance", ""), getattr(answer, "instance", ""))
    return found


def leader_state(
    begun: list[LogEntry], own: list[LogEntry], rest: list[LogEntry], last: LogEntry, policies: PolicySet
) -> State:
    """The log up to the term's beginning, the decisions before `last`, and the rest of the log up to its `as_of`."""
    state = State(SETTINGS, policies.trackers())
    for entry in begun:
        state.apply_entry(entry)
    unread = iter(rest)
    following = next(unread, None)
    for decision in (*own, last):
        assert decision.event is not None
        assert decision.event.stamp is not None
        while following is not None and following.sequence <= decision.event.stamp.as_of:
            state.apply_entry(following)
            following = next(unread, None)
        if decision is not last:
            state.apply(decision.event)
    return state


def test_shadows_with_the_same_trackers_do_not_share_them() -> None:
    fleet = RecordedFleet(policy_set(routing="pointsman"), seed=8).live(700).write_all()
    texts = ("d2lpm", "d2lpm:quantum_tokens=64")

    together = followed(fleet.entries, *texts).shadows
    alone = [followed(fleet.entries, text).shadows[0] for text in texts]

    assert [list(shadow.differences) for shadow in together] == [list(shadow.differences) for shadow in alone]
    assert alone[0].differences != alone[1].differences


class LateComers(RecordedFleet):
    """Requests take their time to the leader, which counts unless they were held up."""

    @override
    def _arrive(self) -> None:
        now, self._now = self._now, self._now - 5.0 * self._random.random()
        command = route(f"late-{len(self.entries)}-{now}", [1, 2, 3], arrived_at=self._now, session="s")
        self._now = now
        self._decided(self._leader.route(command, now))


def test_the_way_to_the_leader_counts_as_it_did() -> None:
    policies = policy_set(routing="pointsman", admission="predicted_ttft")
    fleet = LateComers(policies, seed=4).live(1_200).write_all()

    itself = followed(fleet.entries, "pointsman").shadows[0]

    assert itself.total.both_reject > 3
    assert itself.total.same > 10
    assert not itself.differences


def test_figures_are_sums_of_what_it_decided() -> None:
    fleet = RecordedFleet(policy_set(routing="round_robin"), seed=2).live(700).write_all()
    shadows = followed(fleet.entries, "min_ttft")
    total, decisions = shadows.shadows[0].total, list[ShadowDecision](shadows.shadows[0].differences)

    both = [d for d in decisions if d.agreement == "other"]
    saved = sum((d.running_predicted_ttft or 0.0) - (d.shadow_predicted_ttft or 0.0) for d in both)
    gained = sum(d.shadow_cached_tokens - d.running_cached_tokens for d in both)

    assert len(both) == total.other > 10
    assert total.regret_seconds is not None
    assert total.hit_rate_gain is not None
    assert total.regret_seconds * total.placed == pytest.approx(saved)
    assert saved > 0, "least predicted TTFT costs more than turns do"
    assert total.hit_rate_gain * total.prompt_tokens == pytest.approx(gained)
    assert all(d.shadow_cached_tokens % BLOCK == 0 for d in both)
    assert sum(bucket.decided for bucket in shadows.shadows[0].buckets) == total.decided


def test_too_many_decisions_are_sampled_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = RecordedFleet(policy_set(routing="pointsman"), seed=5).live(500).write_all()
    whole = followed(fleet.entries, "pointsman")
    monkeypatch.setattr("pointsman.analysis.shadow_decisions.CANDIDATES_PER_WALL_SECOND", 1)

    sampled = followed(fleet.entries, "pointsman")

    assert (whole.sampled_out, sampled.sampled_out > 20) == (0, True)
    assert sampled.sampled_out + sampled.shadows[0].total.decided == whole.shadows[0].total.decided
    assert not sampled.shadows[0].differences


def test_a_log_without_its_beginning_and_with_unknown_policies_breaks_nothing() -> None:
    fleet = RecordedFleet(policy_set(routing="pointsman"), seed=5, failing=True).live(800).write_all()
    later = fleet.entries[200:]
    foreign = [
        msgspec.structs.replace(e, event=msgspec.structs.replace(e.event, policy="no_such", settings={"x": 1}))
        if isinstance(e.event, RequestPlaced | LeaderElected)
        else e
        for e in fleet.entries
    ]
    for entries in (later, foreign, foreign[200:]):
        state = State(SETTINGS)
        shadow = Shadow([shadow_choice("round_robin"), shadow_choice("pointsman:displaced_max=2")], state)
        for entry in entries:
            state.apply_entry(entry)
            shadow.apply(entry)
        shadow.begin_again(State(SETTINGS))
        shadow.finish()
        while shadow.work():
            pass
        for report in shadow.summary().shadows:
            assert report.failed == 0, report.failure
            assert (report.total.decided > 50) == (entries is later)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_such", "there is no routing policy no_such"),
        ("pointsman:no_such=1", "there is no setting of pointsman no_such"),
        ("pointsman:displaced_max=many", "pointsman:"),
        ("pointsman:displaced_max", "is not KEY=VALUE"),
        ("pointsman:admission=no_such", "there is no admission policy no_such"),
        ("pointsman:order=edf,order.no_such=1", "there is no setting of edf no_such"),
        ("", "there is no routing policy"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shadow_choice(text)


class LongDocuments(RecordedFleet):
    """Every fifth prompt is late even alone."""

    @override
    def _arrive(self) -> None:
        tokens = 8_000 if self._random.random() < 0.2 else 200
        command = route(f"document-{len(self.entries)}-{self._now}", [], arrived_at=self._now, prompt_tokens=tokens)
        self._decided(self._leader.route(command, self._now))


def test_best_effort_requests_are_placed_as_they_were() -> None:
    policies = policy_set(routing="pointsman", admission="predicted_ttft")
    fleet = LongDocuments(policies, seed=5).live(1_500).write_all()

    itself = followed(fleet.entries, "pointsman").shadows[0]

    placed = [entry.event for entry in fleet.entries if isinstance(entry.event, RequestPlaced)]
    assert sum(event.best_effort for event in placed) > 10
    assert itself.total.same > 100
    assert not itself.differences
    assert itself.total.shadow_predicted_ttft == itself.total.running_predicted_ttft
