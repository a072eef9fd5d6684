"""Several pools behind one ingress: which of them has the model that a client names, and when the ingress is ready."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import InstanceLeft, InstanceReported, InstanceSuspected
from pointsman.ports import EventLog
from pointsman.primitives import Epoch, InstanceId, PoolName, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.placement.fleet_view import FleetView, Model
from pointsman_ingress.placement.hold_queue import HELD_REQUESTS_MAX, HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.pools import Pool, Pools, PoolsBoard
from pointsman_lab.memory.log import MemoryBroker
from tests.support.engine_urls import ANY_URL
from tests.support.events import grant, joined, reported, route
from tests.support.waiting import eventually

CHAT, CODE = PoolName("chat"), PoolName("code")


@dataclass
class Rig:
    pools: Pools
    fleets: dict[PoolName, FleetView]
    logs: dict[PoolName, EventLog]

    async def append(self, pool: PoolName, *events: LogEvent) -> None:
        """Append to the pool's log, and wait until the ingress has read it."""
        last = [await self.logs[pool].append(event) for event in events][-1]
        await eventually(lambda: self.fleets[pool]._state.sequence >= last)

    def found(self, name: str) -> tuple[str, str, str]:
        """Pool, base model and adapter."""
        pool, model = self.pools.find(name)
        return pool.name, model.base, model.adapter

    def least_busy(self, pool: PoolName, adapter: str) -> InstanceId | None:
        """The instance chosen while all are idle."""
        found = self.in_flight(pool).least_busy(Model(adapter or "m", "m", adapter, 0.0))
        return found.id if found is not None else None

    def in_flight(self, pool: PoolName) -> InFlightRequests:
        return InFlightRequests(fleet=self.fleets[pool], events=self.logs[pool], clock=ScaledClock())

    def refusal(self, name: str) -> tuple[int, str]:
        with pytest.raises(ApiError) as refusal:
            self.pools.find(name)
        return refusal.value.status, refusal.value.code


@asynccontextmanager
async def rig(*names: PoolName) -> AsyncIterator[Rig]:
    clock = ScaledClock()
    logs: dict[PoolName, EventLog] = {name: MemoryBroker(name).client(clock, name="test").log for name in names}
    fleets = {name: FleetView(clock, HealthBoard(), ANY_URL) for name in names}
    following = [asyncio.create_task(fleets[name].follow(logs[name])) for name in names]
    unused = cast(Any, None)
    pools = [
        Pool(
            name=name,
            fleet=fleets[name],
            in_flight=unused,
            scheduler=unused,
            tokenizer=unused,
            block_keys=unused,
            events=logs[name],
            retry_budget=unused,
        )
        for name in names
    ]
    yield Rig(Pools(pools, HoldQueue(WallSeconds(30.0), clock)), fleets, logs)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


def naming(instance: str, *, at: float, **names: list[str]) -> InstanceReported:
    """A report of an instance with these adapters and aliases."""
    return msgspec.structs.replace(reported(instance, 0, [], at=at), **names)


def busy(instance: str, *, at: float, requests: int) -> InstanceReported:
    """A report of an instance with so many requests."""
    return msgspec.structs.replace(reported(instance, 0, [], at=at), running=requests - 1, waiting=1)


async def test_a_model_is_found_in_its_pool_under_its_name_its_aliases_and_its_adapters() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, joined("a", model="m", at=1), naming("a", at=2, adapters=["poet"], aliases=["m-latest"]))
        await one.append(CODE, joined("b", model="coder", at=1))

        assert one.found("m") == one.found("m-latest") == ("chat", "m", "")
        assert one.found("poet") == ("chat", "m", "poet")
        assert one.found("coder") == ("code", "coder", "")
        assert [model.name for _, model in one.pools.offered()] == ["m", "m-latest", "poet", "coder"]
        assert one.refusal("nobody") == (404, "model_not_found")
        assert one.refusal("") == (400, "invalid_request")


async def test_a_model_may_exist_while_a_pool_has_had_no_engine() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, joined("a", model="m", at=1))

        assert one.refusal("coder") == (503, "no_engines")
        assert one.found("") == ("chat", "m", "")


async def test_requests_for_an_unknown_model_wait_until_the_log_is_read() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", model="m", at=1))
        one.fleets[CHAT].is_read = False
        asking = asyncio.create_task(one.pools.await_model("poet", owner=""))
        known = await one.pools.await_model("m", owner="")
        too_early = one.refusal("poet")
        await one.append(CHAT, naming("a", at=2, adapters=["poet"]))

        assert known[1].name == "m"
        assert too_early == (503, "no_engines")
        assert (await asking)[1].name == "poet"


async def test_one_owner_fills_half_of_the_places_of_held_requests_and_others_find_some() -> None:
    hold, found = HoldQueue(WallSeconds(30.0), ScaledClock()), asyncio.Event()

    def find() -> bool | None:
        return found.is_set() or None

    flood = [asyncio.create_task(hold.until(find, owner="flood")) for _ in range(HELD_REQUESTS_MAX)]
    await eventually(lambda: sum(task.done() for task in flood) >= HELD_REQUESTS_MAX // 2)
    mine = asyncio.create_task(hold.until(find, owner="mine"))
    await asyncio.sleep(0.1)
    waits = not mine.done()
    found.set()
    answers = await asyncio.gather(*flood)

    assert (waits, await mine) == (True, True)
    assert (answers.count(True), answers.count(None)) == (HELD_REQUESTS_MAX // 2, HELD_REQUESTS_MAX // 2)
    assert not hold._waiting


async def test_an_adapter_is_served_only_by_instances_that_have_it() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1), joined("b", at=1), naming("b", at=2, adapters=["poet"]))
        with_it, any_of_them = one.least_busy(CHAT, "poet"), one.least_busy(CHAT, "")
        await one.append(CHAT, naming("b", at=3))

        assert (with_it, any_of_them) == ("b", "a")
        assert one.least_busy(CHAT, "poet") is None
        assert one.refusal("poet") == (404, "model_not_found")


async def test_without_a_scheduler_placement_checks_name_context_and_model() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1, max_model_len=100), joined("b", at=1, aliases=["m-latest"]))
        await one.append(CHAT, joined("c", at=1), joined("0-liar", model="other", at=1, aliases=["m-latest"]))
        fleet, in_flight = one.fleets[CHAT], one.in_flight(CHAT)
        commands = [route("r", [], **needs) for needs in ({}, {"context_tokens": 101}, {"alias": "m-latest"})]
        placed = [in_flight.least_busy(command) for command in commands]
        for name in ("a", "b", "c", "0-liar"):
            silent = InstanceSuspected(at=2, instance=InstanceId(name), epoch=Epoch(1), silent_seconds=5)
            await one.append(CHAT, silent)
        suspected = [in_flight.least_busy(command) for command in commands]

        assert [known and known.id for known in placed] == ["a", "b", "b"]
        assert [known and known.id for known in suspected] == ["a", "b", "b"]
        assert fleet.context_of(fleet.models["m"]) == 100_000


async def test_a_models_context_is_the_longest_of_instances_that_serve_the_name() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1, max_model_len=1), joined("b", at=1, max_model_len=500))
        await one.append(
            CHAT, joined("c", at=1, max_model_len=300, aliases=["m-latest"]), joined("d", at=1, max_model_len=0)
        )
        fleet = one.fleets[CHAT]
        lengths = {name: fleet.context_of(model) for name, model in fleet.models.items()}

    assert lengths == {"m": 500, "m-latest": 300}


async def test_a_base_model_precedes_aliases_in_other_pools() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, joined("a", model="m", at=1, aliases=["coder", "tools"], adapters=["coder"]))
        await one.append(CODE, joined("b", model="coder", at=1, aliases=["m", "tools"]))

        assert one.found("coder") == ("code", "coder", "")
        assert one.found("m") == ("chat", "m", "")
        assert one.found("tools") == ("chat", "m", "")
        offered = [(pool.name, model.name, model.adapter) for pool, model in one.pools.offered()]
        assert offered == [("chat", "m", ""), ("chat", "tools", ""), ("code", "coder", "")]


async def test_no_pool_takes_a_name_that_another_serves_and_says_that_it_wants_to() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, joined("a", model="m", at=1))
        await one.append(CODE, joined("b", model="coder", at=2), naming("b", at=3, adapters=["sql"], aliases=["tools"]))
        await one.append(CHAT, naming("a", at=4, adapters=["sql", "coder"], aliases=["tools"]))
        taken = [one.found(name) for name in ("coder", "sql", "tools")]
        offered = [(pool.name, model.name) for pool, model in one.pools.offered()]
        said = one.fleets[CHAT]._board.degraded_parts

        await one.append(CODE, naming("b", at=5, aliases=["tools"]))
        given_up = one.found("sql")
        await one.append(CODE, naming("b", at=6, adapters=["sql"], aliases=["tools"]))

        assert taken == [("code", "coder", ""), ("code", "coder", "sql"), ("code", "coder", "")]
        assert offered == [("chat", "m"), ("code", "coder"), ("code", "tools"), ("code", "sql")]
        assert said["models"] == (
            "requests for 'coder' go to pool code, 'sql' go to pool code, 'tools' go to pool code, which served the name first"
        )
        assert given_up == one.found("sql") == ("chat", "m", "sql")
        assert "sql" in one.fleets[CODE]._board.degraded_parts["models"]

        await one.append(CHAT, naming("a", at=7))
        assert one.found("sql") == ("code", "coder", "sql")
        assert all("models" not in fleet._board.lacks for fleet in one.fleets.values())


async def test_a_name_has_its_pool_again_after_a_restart_whichever_log_is_read_first() -> None:
    events: dict[PoolName, list[LogEvent]] = {
        CODE: [joined("b", model="coder", at=2), naming("b", at=3, adapters=["sql"])],
        CHAT: [joined("a", model="m", at=1), naming("a", at=4, adapters=["sql"])],
    }
    for first, second in ((CHAT, CODE), (CODE, CHAT)):
        async with rig(CHAT, CODE) as one:
            await eventually(lambda: all(fleet.is_read for fleet in one.fleets.values()))
            one.fleets[second].is_read = False
            await one.append(first, *events[first])
            early, base = one.refusal("sql"), one.found("m" if first is CHAT else "coder")
            await one.append(second, *events[second])
            one.fleets[second].is_read = True

            assert early == (503, "no_engines")
            assert base[0] == first
            assert one.found("sql") == ("code", "coder", "sql")


async def test_an_event_with_an_earlier_time_makes_no_name_older() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, joined("a", model="m", at=5))
        await one.append(CODE, joined("b", model="coder", at=2), naming("b", at=3, adapters=["sql"]))
        await one.append(CHAT, naming("a", at=1, adapters=["sql"]))

        assert one.found("sql") == ("code", "coder", "sql")


async def test_the_majority_of_instances_decides_the_meaning_of_a_name() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1, aliases=["poet"], adapters=["m"]))
        await one.append(CHAT, joined("b", at=1, adapters=["poet"]), joined("c", at=1, adapters=["poet"]))

        assert one.found("poet") == ("chat", "m", "poet")
        assert one.found("m") == ("chat", "m", "")


async def test_a_pool_without_ready_instances_reports_unschedulable_ones() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1), joined("b", at=1, model="other"), reported("a", 0, [], serving=False))
        board = one.fleets[CHAT]._board

        assert board.lacks == {
            "fleet": "no engine is ready; b is unschedulable: it serves the model 'other', the pool 'm'"
        }


async def test_load_is_the_larger_of_own_requests_and_the_recent_report() -> None:
    async with rig(CHAT) as one:
        in_flight = one.in_flight(CHAT)
        await one.append(CHAT, joined("a", at=1), joined("b", at=1), busy("a", at=1, requests=9))
        long_ago = in_flight.least_busy()
        await one.append(CHAT, busy("a", at=ScaledClock().now(), requests=2))
        just_now = in_flight.least_busy()
        async with (
            in_flight.at_engine(grant("r1", "b"), ScaledClock()),
            in_flight.at_engine(grant("r2", "b"), ScaledClock()),
        ):
            level = in_flight.least_busy()
            async with in_flight.at_engine(grant("r3", "b"), ScaledClock()):
                kept_busy = in_flight.least_busy()
        done = in_flight.least_busy()

    assert [known and known.id for known in (long_ago, just_now, level, kept_busy, done)] == ["a", "b", "a", "a", "b"]


async def test_without_ready_engines_suspected_prefill_engines_are_used() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1, role="decode"), joined("b", at=1))
        for name in ("a", "b"):
            silent = InstanceSuspected(at=2, instance=InstanceId(name), epoch=Epoch(1), silent_seconds=5)
            await one.append(CHAT, silent)

        assert one.least_busy(CHAT, "") == "b"


async def test_a_pool_without_engines_keeps_its_model_and_block_size() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", at=1, block_tokens=32))
        await one.append(CHAT, InstanceLeft(at=2, instance=InstanceId("a"), epoch=Epoch(1), reason="stopped"))

        assert one.found("m") == ("chat", "m", "")
        assert one.fleets[CHAT].block_tokens == 32


async def test_the_leader_of_each_pool_decides_its_block_size() -> None:
    async with rig(CHAT, CODE) as one:
        await one.append(CHAT, elected(1, block_tokens=128), joined("a", at=1, block_tokens=32))
        await one.append(CODE, joined("b", at=1, block_tokens=16), joined("c", at=1, block_tokens=32))
        before = {name: fleet.block_tokens for name, fleet in one.fleets.items()}
        await one.append(CODE, elected(1, block_tokens=32))

        assert before == {CHAT: 128, CODE: 16}
        assert one.fleets[CODE].block_tokens == 32


async def test_a_repeated_election_changes_nothing() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, elected(3, block_tokens=128), joined("a", at=1), elected(3, block_tokens=1))
        await one.append(CHAT, elected(2, block_tokens=1))

        assert one.fleets[CHAT].block_tokens == 128


def elected(term: int, *, block_tokens: int) -> LeaderElected:
    return LeaderElected(at=1.0, term=Term(term), scheduler="s", as_of=0, pool={"block_tokens": block_tokens})


async def test_a_pool_forgets_a_model_after_its_engines_were_replaced() -> None:
    async with rig(CHAT) as one:
        await one.append(CHAT, joined("a", model="old", at=1), joined("b", model="new", at=2))
        await one.append(CHAT, InstanceLeft(at=3, instance=InstanceId("a"), epoch=Epoch(1), reason="stopped"))

        assert one.refusal("old") == (404, "model_not_found")
        assert one.found("") == ("chat", "new", "")


async def test_an_ingress_is_ready_while_a_pool_is_and_reports_what_others_miss() -> None:
    board = PoolsBoard([CHAT, CODE])
    board.pools[CODE].missing("view", "the log is not read yet")
    one_left = await board.answer("/readyz")
    board.pools[CHAT].missing("view", "the log is not read yet")
    none_left = await board.answer("/readyz")

    assert one_left is not None
    assert (one_left[0], json.loads(one_left[2])["missing"]) == (200, {"view of code": "the log is not read yet"})
    assert none_left is not None
    assert none_left[0] == 503


async def test_an_ingress_without_scheduler_and_engines_is_ready_until_shutdown() -> None:
    board = PoolsBoard([CHAT, CODE])
    for pool in (CHAT, CODE):
        board.pools[pool].degraded("scheduler", "no scheduler answers")
        board.pools[pool].degraded("fleet", "no engine is ready")
    blind = await board.answer("/readyz", "verbose")
    board.missing("shutdown", "shutting down")
    stopping = await board.answer("/readyz", "verbose")

    assert blind is not None
    assert blind[0] == 200
    assert b"[-]scheduler of code degraded: no scheduler answers\n" in blind[2]
    assert blind[2].endswith(b"readyz check passed\n")
    assert stopping is not None
    assert stopping[0] == 503
    assert stopping[2].endswith(b"[-]shutdown failed: shutting down\nreadyz check failed\n")
