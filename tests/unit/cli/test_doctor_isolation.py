"""The doctor proves from the log that no cache hit crossed cache groups, finds a planted crossing, and lists who acted."""

from random import Random
from typing import Any

import msgspec
import pytest

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import RequestGranted, ScaleDecided
from pointsman.contracts.fleet import InstanceDraining
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.contracts.subjects import subject_of
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.ports import LogEntry
from pointsman.primitives import Epoch, InstanceId, PoolName, RequestId, Tenant
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor import isolation
from pointsman_cli.doctor.admin_actions import AdminActions
from pointsman_cli.doctor.examination import Diagnosis, examine
from pointsman_cli.doctor.isolation import Isolation
from pointsman_cli.doctor.requests import Requests
from pointsman_cli.doctor.service import Service
from pointsman_cli.history.start_point import StartPoint
from tests.support.events import arrived, finished, given_up_before_each_end, joined, rejected

POOL, ENGINE = PoolName("default"), InstanceId("engine-1")
BLOCK = 64
SETTINGS = PoolSettings(block_tokens=BLOCK)
CHAIN = KeyChain(secret=b"s", model="m", block_tokens=BLOCK)


class Engine:
    """A prefix cache as an engine's, of blocks of 16 tokens. `salted`: whether it keeps groups apart."""

    def __init__(self, *, salted: bool = True, keyed: bool = True) -> None:
        self.events: list[LogEvent] = [joined("engine-1")]
        self._salted = salted
        self._keyed = keyed
        self._held: set[tuple[str, tuple[int, ...]]] = set()
        self._number = 0

    def ask(self, group: str, tokens: list[int], *, answer: int = 20, **fields: Any) -> list[int]:
        """Returns prompt and answer."""
        self._number += 1
        request = RequestId(f"r-{self._number}")
        root = CHAIN.root(cache_salt=group if self._keyed else "")
        keys, lengths = (
            pack_keys(CHAIN.extend(root, tokens)),
            {"prompt_tokens": len(tokens), "max_output_tokens": answer},
        )
        self.events.append(arrived(request, at=1.0, tenant=group, keys=keys, cache_group=group, **lengths, **fields))
        self.events.append(RequestGranted(at=1.0, request=request, instance=ENGINE))
        whole = tokens + [self._number * 1000 + n for n in range(answer)]
        salt = group if self._salted else ""
        cached = 0
        while cached + 16 < len(tokens) and (salt, tuple(tokens[: cached + 16])) in self._held:
            cached += 16
        self._held |= {(salt, tuple(whole[:end])) for end in range(16, len(whole) + 1, 16)}
        counts = {"prompt_tokens": len(tokens), "completion_tokens": answer, "cached_tokens": cached}
        self.events.append(finished(request, ENGINE, at=2.0, **counts))
        return whole

    def serve(self, groups: list[str]) -> "Engine":
        """Conversations of every group, all with one system prompt, in an order by chance."""
        chance = Random(7)
        system = list(range(200))
        talks = {(group, n): system + [chance.randrange(5000) for _ in range(90)] for group in groups for n in range(3)}
        for _ in range(60):
            talk = chance.choice(list(talks))
            said = self.ask(talk[0], talks[talk])
            talks[talk] = said + [chance.randrange(5000) for _ in range(chance.randrange(5, 120))]
        return self


def log_of(events: list[LogEvent]) -> list[LogEntry]:
    return [LogEntry.read(n, subject_of(POOL, event), encode(event)) for n, event in enumerate(events, 1)]


def examined(events: list[LogEvent], *, blind: bool = False) -> Diagnosis:
    beginning = StartPoint(None, "gone" if blind else "", is_blind=blind)
    return examine(log_of(events), SETTINGS, [Isolation(SETTINGS), AdminActions(SETTINGS)], beginning)


def test_groups_that_are_kept_apart_are_proven_to_be() -> None:
    found = examined(Engine().serve(["acme", "umbrella"]).events)

    assert found.findings == []
    assert found.summary == [
        "isolation: no cache hit crossed cache groups: 2 cache groups, no block key in two of them, and the cached tokens of "
        "60 requests explained by their own group's prompts"
    ]


def test_an_engine_without_salts_is_found_though_the_keys_are_apart() -> None:
    found = examined(Engine(salted=False).serve(["acme", "umbrella"]).events)

    assert [finding.severity for finding in found.findings] == ["serious"]
    assert "1 request hit cached tokens that no prompt of their cache group explains" in found.findings[0].what
    assert found.summary[0].startswith("isolation: hits crossed cache groups")


def test_every_crossing_beyond_a_block_is_found() -> None:
    engine = Engine(salted=False)
    memo = list(range(9000, 9400))
    engine.ask("acme", memo)
    engine.ask("umbrella", [1, 2, 3] * 40)
    engine.ask("umbrella", memo)  # a guess

    (finding,) = examined(engine.events).findings
    assert finding.evidence == ["r-3 of 'umbrella' on engine-1: 384 tokens cached, at most 63 explained"]


def test_a_hit_of_a_request_that_its_leader_gave_up_is_checked_like_any_other() -> None:
    for salted in (True, False):
        log = log_of(Engine(salted=salted).serve(["acme", "umbrella"]).events)
        plain, told = (
            examine(entries, SETTINGS, [Isolation(SETTINGS)], StartPoint(None, ""))
            for entries in (log, given_up_before_each_end(log))
        )

        assert (told.summary, told.findings) == (plain.summary, plain.findings)


def test_a_hit_of_several_answers_or_prompts_accuses_nobody_and_hides_nobody() -> None:
    engine = Engine()
    engine.ask("acme", list(range(400)))
    engine.ask("umbrella", list(range(400)))
    engine.ask("acme", list(range(300)), answers=4)
    several = engine.events[-1]
    assert isinstance(several, RequestFinished)
    engine.events[-1] = msgspec.structs.replace(several, cached_tokens=4 * 288)

    assert examined(engine.events).findings == []
    assert "the cached tokens of 2 requests explained" in examined(engine.events).summary[0]

    engine._salted = False  # an engine update, say
    engine.ask("acme", memo := list(range(9000, 9400)))
    engine.ask("umbrella", memo)
    (finding,) = examined(engine.events).findings
    assert "1 request hit cached tokens" in finding.what


def test_prompts_without_keys_may_be_what_a_later_hit_is_of() -> None:
    engine = Engine()
    memo = list(range(9000, 9400))
    engine.ask("umbrella", [7] * 400)
    engine.ask("acme", list(range(400)))
    first = engine.events[-3]
    assert isinstance(first, RequestArrived)
    engine.events[-3] = msgspec.structs.replace(first, answers=2, prompt_tokens=800)
    engine._held |= {("acme", tuple(memo[:end])) for end in range(16, 401, 16)}  # by its second prompt
    engine.ask("acme", memo)

    found = examined(engine.events)

    assert found.findings == []
    assert "of hits unproven: r-2 has several prompts" in found.summary[0]


def test_keys_without_salts_are_found() -> None:
    (finding,) = examined(Engine(keyed=False).serve(["acme", "umbrella"]).events).findings

    assert finding.severity == "serious"
    assert "occurred in prompts of two cache groups" in finding.what


def test_a_log_without_groups_has_no_result() -> None:
    found = examined(Engine().serve([""]).events)

    assert (found.findings, found.summary) == ([], [])


@pytest.mark.parametrize("why", ["blind", "unknown cache", "guessed", "no arrival", "full"])
def test_what_cannot_be_proven_is_said(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(salted=False)
    if why == "unknown cache":
        engine.events[0] = joined("engine-1", cache="unknown")
    if why == "full":
        monkeypatch.setattr(isolation, "KEYS_MAX", 3)
    engine.ask("acme", list(range(400)), exact=why != "guessed")
    if why == "no arrival":
        del engine.events[1]
    engine.ask("umbrella", list(range(400)))
    found = examined(engine.events, blind=why == "blind")

    assert found.findings == []
    assert "of hits unproven: " in found.summary[0]


def test_what_is_remembered_of_a_long_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "KEYS_MAX", 10)
    engine, found = Engine(), Isolation(SETTINGS)
    for number in range(100):
        engine.ask("acme", [number * 1000 + token for token in range(2 * BLOCK)])
    for event in engine.events:
        found.before(event, State(SETTINGS))

    assert len(found._reach) <= 10


def test_a_request_that_was_tried_twice_may_hit_what_it_left_itself() -> None:
    engine = Engine()
    engine.ask("acme", list(range(400)))
    finish = engine.events[-1]
    assert isinstance(finish, RequestFinished)
    stamped = engine.events[-2]
    engine.events[-1:] = [stamped, stamped]
    assert examined(engine.events).findings == []


def test_admin_actions_are_listed_with_their_authors() -> None:
    drain = InstanceDraining(at=1.0, instance=ENGINE, epoch=Epoch(1), reason="pointsman drain", by="alice")
    found = examined(
        [
            joined("engine-1"),
            drain,
            InstanceDraining(at=1.0, instance=ENGINE, epoch=Epoch(1), reason="surplus", by="scaler"),
            ScaleDecided(at=2.0, number=1, wanted=6, current=4, policy="manual", settings={}, reason="", by="bob"),
            TenantPoliciesSet(at=3.0, policies=TenantPolicies(default=TenantPolicy(concurrency=8)), by="bob"),
            ApiKeyChanged(at=4.0, key="k1", tenant=Tenant("acme"), action="revoke", by="bob"),
        ]
    )

    (note,) = found.findings
    assert note.severity == "note"
    assert note.what == "4 admin actions by bob (3), alice (1)"
    assert [line.split(" ", 2)[2] for line in note.evidence] == [
        "alice drained engine-1",
        "bob set 6 instances",
        "bob set policies: default (concurrency 0 -> 8)",
        "bob revoke: key k1 of acme",
    ]


def test_requests_beyond_a_tenants_limits_are_no_sign_of_too_much_load() -> None:
    engine = Engine()
    for _ in range(3):
        engine.ask("", list(range(80)))
    events = engine.events
    for number, reason in enumerate(
        [RejectReason.RATE_LIMITED] * 4 + [RejectReason.QUOTA_EXCEEDED, RejectReason.SLO_TTFT]
    ):
        request = RequestId(f"x-{number}")
        arrived = next(event for event in events if isinstance(event, RequestArrived))
        events.append(msgspec.structs.replace(arrived, request=request, tenant=Tenant("flood")))
        events.append(rejected(request, reason, at=2.0))
    entries = [LogEntry.read(n, subject_of(POOL, event), encode(event)) for n, event in enumerate(events, 1)]

    diagnosis = examine(entries, SETTINGS, [Requests(SETTINGS), Service(SETTINGS)], StartPoint(None, ""))
    found = {finding.what: finding for finding in diagnosis.findings}

    limited = found["5 of 9 requests (55.6%) were beyond their tenant's limits"]
    assert limited.severity == "note"
    assert limited.evidence[-1] == "of flood (5)"
    assert "tenants show" in limited.advice
    assert diagnosis.summary[0].startswith("4 requests, 75.0% with the first token in time")
    assert "what-if" in found["1 of 9 requests (11.1%) were rejected"].advice
