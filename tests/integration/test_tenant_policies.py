"""Tenant policies from the operator's command or another pool's leader into the store, the log and every decision after."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import msgspec
import pytest
from click import ClickException

from pointsman.adapters.tenants_file import with_changes
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import (
    DescribeFleet,
    DescribeTenants,
    FleetDescribed,
    RouteGranted,
    RouteRejected,
    SetTenantPolicies,
    TenantDescribed,
    TenantPoliciesAnswered,
    TenantsDescribed,
)
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.ports import StoreUnavailableError, ValuesRead
from pointsman.primitives import Tenant, WallSeconds
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.tenant_policies import TENANTS_KEY
from pointsman_cli.tenants import replacing
from pointsman_scheduler import handlers
from tests.support.log_reading import events_in
from tests.support.memory_pool import POOL, MemoryPool
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually

ONE_AT_A_TIME = TenantPolicies(tenants={Tenant("alice"): TenantPolicy(concurrency=1)})
TWO_AT_A_TIME = TenantPolicies(tenants={Tenant("alice"): TenantPolicy(concurrency=2)})


class TenantPool(MemoryPool):
    async def set(self, policies: TenantPolicies, *, operator: str = "carol", revision: int | None = None) -> str:
        command = SetTenantPolicies(policies=policies, revision=revision)
        answer = await self.operate(command, action="tenants", operator=operator)
        assert isinstance(answer, TenantPoliciesAnswered)
        return answer.refusal

    async def store(self, document: bytes) -> None:
        known = await self.broker.access.get(TENANTS_KEY)
        await self.broker.access.put(TENANTS_KEY, document, after=known.revision if known else 0)

    async def stored(self) -> TenantPolicies | None:
        known = await self.broker.access.get(TENANTS_KEY)
        return msgspec.json.decode(known.value, type=TenantPolicies) if known else None

    async def logged(self) -> list[tuple[TenantPolicies, str]]:
        return [
            (event.policies, event.by)
            for event in await events_in(self.client.log)
            if isinstance(event, TenantPoliciesSet)
        ]

    async def asks(self, request: str, tenant: str = "alice") -> RouteGranted | RouteRejected:
        answer = await self.route(request, [1], tenant=Tenant(tenant))
        assert isinstance(answer, RouteGranted | RouteRejected)
        return answer

    async def described(self) -> TenantsDescribed:
        answer = await self.ask(DescribeTenants(), kind="fleet")
        assert isinstance(answer, TenantsDescribed)
        return answer


@pytest.fixture
async def pool() -> TenantPool:
    opened = TenantPool()
    await opened.append(opened.joined("a"))
    return opened


@in_virtual_time
async def test_an_operators_policies_are_stored_logged_under_his_name_and_hold_at_once(pool: TenantPool) -> None:
    async with pool.scheduler():
        assert await pool.set(ONE_AT_A_TIME) == ""
        answers = [await pool.asks("first"), await pool.asks("second"), await pool.asks("other", "bob")]

        assert [type(answer) for answer in answers] == [RouteGranted, RouteRejected, RouteGranted]
        assert isinstance(answers[1], RouteRejected)
        assert (answers[1].reason, answers[1].status) == ("concurrency_exceeded", 429)
        assert await pool.stored() == ONE_AT_A_TIME
        assert await pool.logged() == [(ONE_AT_A_TIME, "carol")]


@in_virtual_time
async def test_the_same_policies_again_change_nothing(pool: TenantPool) -> None:
    async with pool.scheduler():
        for _ in range(2):
            assert await pool.set(ONE_AT_A_TIME) == ""
        await asyncio.sleep(1.2)  # it is read again meanwhile

        assert await pool.logged() == [(ONE_AT_A_TIME, "carol")]


@in_virtual_time
async def test_what_another_pools_leader_stores_holds_within_a_second(pool: TenantPool) -> None:
    async with pool.scheduler() as scheduler:
        await pool.store(msgspec.json.encode(ONE_AT_A_TIME))
        await eventually(lambda: scheduler.state.tenants.policies == ONE_AT_A_TIME, seconds=1.5)
        await pool.store(msgspec.json.encode(TWO_AT_A_TIME))
        await eventually(lambda: scheduler.state.tenants.policies == TWO_AT_A_TIME, seconds=1.5)

        assert await pool.logged() == [(ONE_AT_A_TIME, ""), (TWO_AT_A_TIME, "")]


@in_virtual_time
async def test_a_read_from_before_a_change_does_not_follow_it_into_the_log(
    pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.store(msgspec.json.encode(TWO_AT_A_TIME))
    before, goes_on = await pool.broker.access.get(TENANTS_KEY), asyncio.Event()
    assert before is not None

    async def follow() -> AsyncIterator[ValuesRead]:
        await goes_on.wait()
        yield ValuesRead([before], whole=True)
        await asyncio.Event().wait()

    monkeypatch.setattr(pool.broker.access, "follow", follow)
    async with pool.scheduler() as scheduler:
        assert await pool.set(ONE_AT_A_TIME) == ""
        goes_on.set()
        await asyncio.sleep(0.3)

        assert await pool.logged() == [(ONE_AT_A_TIME, "carol")]
        assert scheduler.state.tenants.policies == ONE_AT_A_TIME


@in_virtual_time
async def test_a_new_leader_takes_what_was_stored_meanwhile_and_writes_it_only_if_it_differs(pool: TenantPool) -> None:
    async with pool.scheduler("one", lease_seconds=0.6):
        await pool.set(ONE_AT_A_TIME)
    async with pool.scheduler("two", lease_seconds=0.6) as scheduler:
        await eventually(lambda: scheduler.leading)
        await asyncio.sleep(1.2)
        assert len(await pool.logged()) == 1
    await pool.store(msgspec.json.encode(TWO_AT_A_TIME))
    async with pool.scheduler("three", lease_seconds=0.6) as scheduler:
        await eventually(lambda: scheduler.leading)
        await eventually(lambda: scheduler.state.tenants.policies == TWO_AT_A_TIME, seconds=1.5)

        assert await pool.logged() == [(ONE_AT_A_TIME, "carol"), (TWO_AT_A_TIME, "")]


async def test_a_write_that_was_stored_though_nobody_heard_of_it_is_no_refusal_and_holds(
    pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = pool.broker.access.put

    async def unheard(*arguments: Any, **named: Any) -> int:
        await put(*arguments, **named)
        raise StoreUnavailableError("no answer in time")

    async with pool.scheduler() as scheduler:
        monkeypatch.setattr(pool.broker.access, "put", unheard)
        answer = await pool.set(ONE_AT_A_TIME)
        await eventually(lambda: scheduler.state.tenants.policies == ONE_AT_A_TIME)

    assert "it may have been stored" in answer
    assert "pointsman tenants show" in answer


@in_virtual_time
async def test_a_follower_writes_nothing(pool: TenantPool) -> None:
    async with pool.scheduler("one"), pool.scheduler("two") as two:
        await pool.store(msgspec.json.encode(ONE_AT_A_TIME))
        await eventually(lambda: two.state.tenants.policies == ONE_AT_A_TIME, seconds=3.0)
        await asyncio.sleep(0.6)

        assert len(await pool.logged()) == 1


@pytest.mark.parametrize("document", [b"", b"{", b'{"default": 7}', b'{"tenants": {"a": {"weight": -1}}}', b"\xff"])
@in_virtual_time
async def test_a_broken_document_keeps_the_last_good_one(pool: TenantPool, document: bytes) -> None:
    async with pool.scheduler() as scheduler:
        await pool.set(ONE_AT_A_TIME)
        await pool.store(document)
        await asyncio.sleep(0.8)

        assert scheduler.leading
        assert await pool.logged() == [(ONE_AT_A_TIME, "carol")]
        assert await pool.set(TWO_AT_A_TIME) == "", "it can be mended"


@in_virtual_time
async def test_a_store_that_was_deleted_keeps_them_too(pool: TenantPool) -> None:
    async with pool.scheduler() as scheduler:
        await pool.set(ONE_AT_A_TIME)
        pool.broker.access.recreate()
        await asyncio.sleep(0.8)
        assert scheduler.state.tenants.policies == ONE_AT_A_TIME
        await pool.store(msgspec.json.encode(TWO_AT_A_TIME))
        await eventually(lambda: scheduler.state.tenants.policies == TWO_AT_A_TIME, seconds=2.0)


@in_virtual_time
async def test_without_a_store_nothing_is_written_and_nobody_is_limited(pool: TenantPool) -> None:
    async with pool.scheduler():
        assert isinstance(await pool.asks("first"), RouteGranted)
        assert isinstance(await pool.asks("second"), RouteGranted)

        assert await pool.logged() == []
        assert await pool.described() == TenantsDescribed(pool=POOL, revision=0)


async def test_of_two_operators_who_read_the_same_policies_the_second_is_refused(pool: TenantPool) -> None:
    async with pool.scheduler():
        read = (await pool.described()).revision
        first = await pool.set(ONE_AT_A_TIME, operator="carol", revision=read)
        second = await pool.set(TWO_AT_A_TIME, operator="dave", revision=read)

        assert first == ""
        assert "somebody else has changed the policies" in second
        assert await pool.stored() == ONE_AT_A_TIME
        assert await pool.logged() == [(ONE_AT_A_TIME, "carol")]
        assert await pool.set(TWO_AT_A_TIME, revision=(await pool.described()).revision) == "", "read again"


async def test_what_another_pools_leader_has_just_stored_is_not_replaced_unseen(pool: TenantPool) -> None:
    async with pool.scheduler():
        await pool.set(ONE_AT_A_TIME)
        read = await pool.described()
        await pool.store(msgspec.json.encode(TWO_AT_A_TIME))
        refusal = await pool.set(ONE_AT_A_TIME, revision=read.revision)

        assert "somebody else has changed the policies" in refusal
        seen = await pool.described()
        assert seen.policies == TWO_AT_A_TIME, "at once, so that the operator may try again"
        assert await pool.set(ONE_AT_A_TIME, revision=seen.revision) == ""


async def test_a_command_without_a_revision_replaces_any_policies(pool: TenantPool) -> None:
    async with pool.scheduler():
        await pool.set(ONE_AT_A_TIME, revision=0)

        assert await pool.set(TWO_AT_A_TIME) == ""


@pytest.mark.parametrize("lost", ["broken", "deleted"])
async def test_policies_that_the_store_has_lost_can_be_changed_by_who_read_them(pool: TenantPool, lost: str) -> None:
    async with pool.scheduler():
        await pool.set(ONE_AT_A_TIME)
        await asyncio.sleep(0.8)
        if lost == "broken":
            await pool.store(b"{")
        else:
            pool.broker.access.recreate()
        await asyncio.sleep(0.8)
        read = await pool.described()

        assert read.policies == ONE_AT_A_TIME
        assert await pool.set(TWO_AT_A_TIME, revision=read.revision) == ""


async def test_pointsman_tenants_set_loses_no_change_of_another_operator_and_apply_replaces_it(
    pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = pool.broker.client(name="slower", clock=pool.clock).commands
    request = commands.request

    async def overtaken(subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        if isinstance(command, SetTenantPolicies):
            await pool.set(ONE_AT_A_TIME, operator="dave")
        return await request(subject, command, timeout=timeout)

    monkeypatch.setattr(commands, "request", overtaken)
    settings = FleetSettings(pool=POOL)
    change = replacing(lambda known: with_changes(known, ["bob.concurrency=2"]))
    replace = replacing(lambda _known: TWO_AT_A_TIME, whatever_was=True)
    async with pool.scheduler():
        with pytest.raises(ClickException, match="somebody else has changed the policies"):
            await change(commands, settings)
        assert await pool.stored() == ONE_AT_A_TIME

        changed = await change(pool.client.commands, settings)
        assert changed.after == await pool.stored()
        assert set(changed.after.tenants) == {"alice", "bob"}
        await replace(commands, settings)
        assert await pool.stored() == TWO_AT_A_TIME


@in_virtual_time
async def test_the_leader_says_what_tenants_use(pool: TenantPool) -> None:
    async with pool.scheduler():
        await pool.set(ONE_AT_A_TIME)
        await pool.asks("first")
        await pool.asks("other", "bob")

        described = await pool.described()
        assert described.policies == ONE_AT_A_TIME
        assert described.tenants == [TenantDescribed(tenant=Tenant("alice"), in_flight=1, tokens_today=75)]


@in_virtual_time
async def test_who_asks_for_descriptions_in_a_flood_gets_a_bounded_share_of_the_leader(
    pool: TenantPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count(step=0.15)  # CPU seconds: one at its begin, one at its end
    monkeypatch.setattr("pointsman_scheduler.handlers.time.thread_time", lambda: next(taken))
    async with pool.scheduler():
        asked = [pool.described() for _ in range(100)]
        answered = [a for a in await asyncio.gather(*asked, return_exceptions=True) if isinstance(a, TenantsDescribed)]
        fleet = await pool.ask(DescribeFleet(), kind="fleet")
        await asyncio.sleep(30.0)
        again = await pool.described()

    most = (handlers.DESCRIBING_BURST_SECONDS + 3.0 * handlers.DESCRIBING_SHARE) / 0.15 + 1
    assert 0 < len(answered) <= most
    assert isinstance(fleet, FleetDescribed)
    assert again.pool == POOL
