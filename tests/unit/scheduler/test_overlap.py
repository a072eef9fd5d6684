"""Who holds which prefix: against a slow twin, in each state of knowledge, and within the share of time that lookups get."""

import asyncio
import base64
import hmac
import json
from hashlib import blake2b
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.codec import AnyCommand, decode_command
from pointsman.contracts.fleet import InstanceProbed
from pointsman.contracts.overlap import (
    OVERLAP_BYTES_MAX,
    InstanceOverlap,
    OverlapAnswered,
    OverlapPrompt,
    OverlapRefused,
    OverlapRequest,
)
from pointsman.contracts.subjects import command_subject
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.ports import NoResponderError
from pointsman.primitives import BlockKey, Epoch, InstanceId, PoolName, Tenant, WallSeconds
from pointsman.state.state import PoolSettings, State
from pointsman_lab.memory.log import MemoryBroker
from pointsman_scheduler.leader import Candidacy
from pointsman_scheduler.overlap import (
    BURST_SECONDS,
    FOLLOWER_SHARE,
    LEADER_SHARE,
    REFUSALS_MAX,
    OverlapService,
    held_blocks,
    overlaps,
)
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.work_budget import WorkBudget
from tests.support.events import BLOCK, joined, removed, reported, stored
from tests.support.leading import leader_of, place
from tests.support.settable_clock import StandingClock

POOL = PoolName("default")
SECRET = "a secret"
NAMES = ("a", "b", "c")
LENGTH = 6


class Steps(StandingClock):
    """Wall time that stands still, and CPU time that passes, wall time with it, `step` seconds whenever it is looked at."""

    step = 0.0

    def cpu(self) -> float:
        self.at += self.step
        return self.at


class Standing:
    """Whether the scheduler leads."""

    leading: Any = None


class Service:
    def __init__(self) -> None:
        self.state = State(PoolSettings(block_tokens=BLOCK))
        self.clock = Steps()
        self.standing = Standing()
        self.broker = MemoryBroker(POOL)
        self.replica = Replica(self.state, POOL)
        self.served = OverlapService(
            replica=self.replica,
            leader=cast("Candidacy", self.standing),
            event_log=self.broker.client(self.clock, name="s").log,
            clock=self.clock,
            pool=POOL,
            name="s",
            secret=SECRET,
            cpu=self.clock.cpu,
        )

    async def ask(self, payload: bytes) -> AnyCommand:
        answers: list[bytes] = []

        class Reply:
            subject = "pm.default.cmd.overlap"
            waited = WallSeconds(0.0)

            async def __call__(self, answer: AnyCommand | bytes) -> None:
                assert isinstance(answer, bytes)
                answers.append(answer)

        await self.served.answer(payload, Reply())
        (answer,) = answers
        return decode_command(answer)

    async def overlap(self, *prompts: Any, **fields: Any) -> OverlapAnswered:
        answer = await self.ask(request(*prompts, **fields))
        assert isinstance(answer, OverlapAnswered), answer
        return answer


def request(*prompts: Any, **fields: Any) -> bytes:
    return json.dumps({"type": "OverlapRequest", "prompts": prompts, **fields}).encode()


def told(state: State, prompts: list[list[BlockKey]]) -> list[InstanceOverlap]:
    return overlaps(state, [held_blocks(state, prompt) for prompt in prompts])


def packed(keys: list[int]) -> str:
    return base64.b64encode(b"".join(key.to_bytes(8, "little") for key in keys)).decode()


def chained(tokens: list[int], *, lora: str = "", salt: str = "") -> list[int]:
    """By the definition in docs/overlap.md, without our own code."""
    secret = SECRET.encode()
    root = "\x00".join(("pointsman-1", "m", lora, salt, str(BLOCK))).encode()
    digest, keys = blake2b(root, key=secret, digest_size=8).digest(), []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + BLOCK])
        digest = blake2b(digest + block, key=secret, digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little"))
    return keys


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(NAMES), st.integers(1, LENGTH), st.integers(1, LENGTH))))
def test_matches_are_those_of_a_slow_twin(history: list[tuple[bool, str, int, int]]) -> None:
    state, held = State(PoolSettings(block_tokens=BLOCK)), {name: set[int]() for name in NAMES}
    for name in NAMES:
        state.apply(joined(name))
    for number, (stores, name, first, last) in enumerate(history, 1):
        keys = list(range(first, max(first, last) + 1))
        if stores:
            state.apply(stored(name, number, keys, parent=first - 1))
            held[name].update(keys)
        else:
            state.apply(removed(name, number, keys))
            held[name].difference_update(keys)
    prompts = [[BlockKey(key) for key in range(1, length + 1)] for length in range(LENGTH + 1)]

    found = {overlap.instance: overlap.matched_blocks for overlap in told(state, prompts)}

    def depth(name: str, prompt: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(prompt) if key not in held[name]), len(prompt))

    assert found == {name: [depth(name, prompt) for prompt in prompts] for name in NAMES}


async def test_token_ids_and_their_keys_get_the_same_answer() -> None:
    service, tokens = Service(), list(range(1000, 1000 + 40_000))
    keys = chained(tokens)
    service.state.apply(joined("a"), 7)
    service.state.apply(stored("a", 1, keys[:300]), 8)
    answer = await service.overlap({"token_ids": tokens}, {"block_keys": packed(keys)}, {"token_ids": tokens[:10]})

    (found,) = answer.instances
    assert found.matched_blocks == [300, 300, 0]
    assert found.matched_tokens == [300 * BLOCK, 300 * BLOCK, 0]
    assert (answer.pool, answer.model, answer.block_tokens) == (POOL, "m", BLOCK)
    assert (answer.scheduler, answer.leading, answer.as_of) == ("s", False, 8)


async def test_adapters_and_salts_have_prefixes_of_their_own() -> None:
    service, tokens = Service(), list(range(BLOCK))
    service.state.apply(joined("a"))
    for number, keys in enumerate((chained(tokens, lora="sql"), chained(tokens, salt="pepper")), 1):
        service.state.apply(stored("a", number, keys))

    async def blocks(**fields: Any) -> list[int]:
        return (await service.overlap({"token_ids": tokens}, **fields)).instances[0].matched_blocks

    assert await blocks() == [0]
    assert await blocks(adapter="sql") == [1]
    assert await blocks(cache_salt="pepper") == [1]
    assert await blocks(adapter="sql", cache_salt="pepper") == [0]


async def test_a_tenant_sees_what_its_group_shares() -> None:
    """The salt is written out here as docs/security.md tells it: HMAC of the group's name with the secret."""
    service, tokens = Service(), list(range(BLOCK))
    policies = TenantPolicies(tenants={Tenant(name): TenantPolicy(cache_group="g") for name in ("one", "two")})
    service.state.apply(TenantPoliciesSet(at=1.0, policies=policies))
    service.state.apply(joined("a"))
    label, group = b"pointsman-cache-salt-1\x00", b"group:g"
    salt = hmac.new(SECRET.encode(), label + b"%d\x00" % len(group) + group, "sha256").hexdigest()[:43]
    service.state.apply(stored("a", 1, chained(tokens, salt=salt)))

    async def blocks(tenant: str) -> list[int]:
        return (await service.overlap({"token_ids": tokens}, tenant=tenant)).instances[0].matched_blocks

    assert [await blocks(tenant) for tenant in ("one", "two", "three", "")] == [[1], [1], [0], [0]]


async def test_each_instance_says_how_far_it_is_known_and_why() -> None:
    service = Service()
    for name in ("exact", "gap", "unproven", "blind"):
        service.state.apply(joined(name, cache="no_events" if name == "blind" else "empty"))
        if name not in ("unproven", "blind"):
            service.state.apply(
                InstanceProbed(at=1.0, instance=InstanceId(name), epoch=Epoch(1), parity=True, detail="")
            )
    service.state.apply(stored("gap", 3, [1, 2]))
    service.state.apply(reported("exact", 0, [], at=1.0))
    answer = await service.overlap({"block_keys": packed([1, 2])})

    known = {i.instance: (i.knowledge, i.knowledge_reason, i.matched_blocks) for i in answer.instances}
    assert known == {
        "exact": ("exact", "", [0]),
        "gap": ("degraded", "cache events 1 to 2 are missing", [2]),
        "unproven": ("degraded", "no probe has compared keys yet", [0]),
        "blind": ("blind", "the engine publishes no KV events", [0]),
    }


async def test_what_a_placed_request_will_bring_is_not_held_yet() -> None:
    leader = leader_of(["a"], PolicySet(routing=RoundRobin(), admission=AdmitAll(), ordering=FirstComeFirstServed()))
    place(leader, "r", [1, 2])

    assert leader.state.hits([BlockKey(1)]) == {"a": 1}
    assert [overlap.matched_blocks for overlap in told(leader.state, [[BlockKey(1)]])] == [[0]]


async def test_it_says_how_far_behind_the_log_it_is() -> None:
    service = Service()
    log = service.broker.client(service.clock, name="w").log
    for epoch in range(1, 5):
        await log.append(joined("a", epoch=epoch, at=service.clock.now()))
    last = await log.append(joined("a", epoch=5, at=service.clock.now()))
    service.state.apply(joined("a", at=service.clock.now() - 30.0), last - 3)
    answer = await service.overlap({"token_ids": [1]})

    assert (answer.as_of, answer.behind) == (last - 3, 3)
    assert 30.0 <= answer.age < 40.0


async def test_nobody_is_answered_before_the_log_is_read() -> None:
    service = Service()
    link = service.broker.client(service.clock, name="r")
    request = OverlapRequest(prompts=[OverlapPrompt(token_ids=[1])])
    subject = command_subject(POOL, "overlap")
    serving = asyncio.create_task(service.served.serve(link.commands, end=9))
    await asyncio.sleep(0)
    with pytest.raises(NoResponderError):
        await link.commands.request(subject, request, timeout=WallSeconds(1.0))
    service.state.apply(joined("a"), 9)
    service.replica.notify()
    await asyncio.sleep(0)
    answer = await link.commands.request(subject, request, timeout=WallSeconds(1.0))
    serving.cancel()

    assert isinstance(answer, OverlapAnswered)
    assert answer.as_of == 9


async def test_a_log_that_does_not_answer_delays_no_answer() -> None:
    service = Service()
    service.broker.disconnect()

    assert (await service.overlap({"token_ids": [1]})).behind == 0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "invalid"),
        (b"{", "invalid"),
        (b'{"type":"DescribeFleet"}', "invalid"),
        (request({"token_ids": [-1]}), "invalid"),
        (b" " * (OVERLAP_BYTES_MAX + 1), "too_large"),
    ],
)
async def test_what_is_no_request_is_refused_with_a_reason(payload: bytes, reason: str) -> None:
    answer = await Service().ask(payload)

    assert isinstance(answer, OverlapRefused)
    assert (answer.reason, answer.retry_after) == (reason, 0.0)
    assert answer.detail


@given(st.binary(max_size=600), st.integers(0, 100))
def test_whatever_is_sent_gets_an_answer(noise: bytes, cut: int) -> None:
    service, sound = Service(), request({"token_ids": [1, 2]}, {"block_keys": packed([1])})
    for payload in (noise, sound[:cut] + noise + sound[cut:]):
        answer = asyncio.run(service.ask(payload))

        assert isinstance(answer, OverlapAnswered | OverlapRefused)


async def test_a_leader_gives_lookups_their_share_of_time_and_no_more() -> None:
    service = Service()
    service.standing.leading = object()
    service.clock.step = 0.001
    answered = refused = 0
    began = service.clock.at
    while service.clock.at - began < 60.0:
        answer = await service.ask(request({"token_ids": [1]}))
        if isinstance(answer, OverlapRefused):
            refused += 1
            assert answer.reason == "too_often"
            service.clock.at += answer.retry_after
        else:
            answered += 1
    worked = (5 * answered + refused) * service.clock.step  # decoding, hashing, looking up, answering, encoding

    assert refused
    assert worked == pytest.approx(60.0 * LEADER_SHARE, rel=0.1)


async def test_in_a_flood_it_leaves_the_subject_for_a_while() -> None:
    service = Service()
    link, subject = service.broker.client(service.clock, name="r"), command_subject(POOL, "overlap")
    question = OverlapRequest(prompts=[OverlapPrompt(token_ids=[1])])
    serving = asyncio.create_task(service.served.serve(link.commands, end=0))
    await asyncio.sleep(0)
    began, service.clock.step = service.clock.at, 1.0  # the first answer uses up the budget of many seconds
    await link.commands.request(subject, question, timeout=WallSeconds(1.0))
    service.clock.at, service.clock.step = began, 0.0
    for _ in range(REFUSALS_MAX):
        assert isinstance(await link.commands.request(subject, question, timeout=WallSeconds(1.0)), OverlapRefused)
    await asyncio.sleep(0.01)
    with pytest.raises(NoResponderError):
        await link.commands.request(subject, question, timeout=WallSeconds(1.0))
    service.clock.at += 1000.0
    await asyncio.sleep(1.1)
    answer = await link.commands.request(subject, question, timeout=WallSeconds(1.0))
    serving.cancel()

    assert isinstance(answer, OverlapAnswered)


@pytest.mark.parametrize("share", [LEADER_SHARE, FOLLOWER_SHARE])
@pytest.mark.parametrize("work", [0.002, 0.03, 0.5])
def test_work_takes_its_share_of_time_whatever_its_pieces(share: float, work: float) -> None:
    clock = Steps()
    budget, began, spent = WorkBudget(clock, burst=BURST_SECONDS), clock.at, 0.0
    while clock.at - began < 200.0:
        clock.at += budget.wait_seconds(share) + work
        budget.spend(work)
        spent += work

    assert spent == pytest.approx(200.0 * share, rel=0.06)


def test_a_budget_that_was_not_used_allows_a_short_burst() -> None:
    clock = Steps()
    budget = WorkBudget(clock, burst=BURST_SECONDS)
    clock.at += 3600.0
    assert budget.wait_seconds(0.5) == 0.0
    budget.spend(0.025)

    assert budget.wait_seconds(0.5) == pytest.approx(0.01)
    assert budget.wait_seconds(0.05) == pytest.approx(0.1)


def test_our_chain_is_the_one_that_is_documented() -> None:
    chain, tokens = KeyChain(secret=SECRET.encode(), model="m", block_tokens=BLOCK), list(range(5 * BLOCK + 3))

    assert chain.extend(chain.root(lora="x", cache_salt="y"), tokens) == chained(tokens, lora="x", salt="y")


def test_nothing_is_asked_of_a_fleet_without_instances() -> None:
    assert told(State(PoolSettings()), [[BlockKey(1)]]) == []
