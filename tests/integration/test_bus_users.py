"""A nats-server with users: each role does its work, is refused everything else, and cannot make the server do it."""

import asyncio
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from pointsman.contracts.commands import (
    DescribeFleet,
    DrainAnswered,
    DrainInstance,
    HeartbeatNoted,
    NoteHeartbeat,
    ResyncCache,
    ScalePool,
)
from pointsman.contracts.decisions import LeaderElected, ScaleDecided
from pointsman.contracts.fleet import InstanceProbed
from pointsman.contracts.overlap import OverlapPrompt, OverlapRefused, OverlapRequest
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import (
    admin_subject,
    command_subject,
    heartbeat_subject,
    leader_subject,
    resync_subject,
    stream_name,
)
from pointsman.ports import (
    CheckpointLabel,
    CommandHandler,
    CommandTimeoutError,
    Link,
    LogEntry,
    LogMissingError,
    NoResponderError,
    Reply,
)
from pointsman.primitives import Epoch, InstanceId, Term, WallSeconds
from tests.support.bus import (
    ADMIN,
    POOLS,
    ROUTERS,
    SETTLE_SECONDS,
    USERS,
    WORKERS,
    LockedBus,
    beyond,
    granted,
    locked_bus,
    start_bus,
)
from tests.support.events import joined, reported, stored
from tests.support.log_worlds import RememberingListener
from tests.support.waiting import eventually

POOL = POOLS[0]
SCHEDULER, INGRESS, SCALER, READER = (
    BusUser(role) for role in (BusRole.SCHEDULER, BusRole.INGRESS, BusRole.SCALER, BusRole.READER)
)
WORKER = WORKERS[0]
ALICE = BusUser(BusRole.OPERATOR, "alice")
IDS = [" ".join(filter(None, (user.role, user.pool, user.name))) for user in USERS]
LOG = stream_name(POOL)
FORBIDDEN_CALLS = [
    f"$JS.API.{call}"
    for call in (
        "INFO", "STREAM.LIST", "STREAM.NAMES", f"STREAM.DELETE.{LOG}", f"STREAM.PURGE.{LOG}", f"STREAM.MSG.DELETE.{LOG}",
        f"STREAM.SNAPSHOT.{LOG}", f"STREAM.RESTORE.{LOG}", f"STREAM.DELETE.KV_pointsman-{POOL}", "STREAM.CREATE.EVIL",
        f"STREAM.UPDATE.KV_pointsman-{POOL}", f"CONSUMER.DURABLE.CREATE.{LOG}.evil", f"CONSUMER.NAMES.{LOG}",
        f"CONSUMER.DELETE.{LOG}.x", f"CONSUMER.CREATE.{LOG}", f"CONSUMER.CREATE.OBJ_pointsman-{POOL}.x",
        f"DIRECT.GET.{LOG}", "SERVER.REMOVE", "ACCOUNT.PURGE.FLEET",
    )
]  # fmt: skip
FORBIDDEN = [
    *FORBIDDEN_CALLS,
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.USER.INFO",
    f"$JS.ACK.{LOG}.x.1.1.1.1.1",
    "pm.default.lost.x",
    "x",
]


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBus]:
    """With the streams that a scheduler makes."""

    async def begin() -> LockedBus:
        bus = await start_bus(tmp_path_factory.mktemp("bus"))
        for pool in POOLS:
            async with bus.link(SCHEDULER, pool) as link:
                await eventually(lambda link=link: _has_log(link))  # type: ignore[misc]
                await link.log.elect(LeaderElected(at=1.0, scheduler="s", term=Term(1), as_of=0), after=0)
                await link.lease.put("s", Term(1), after=0)
                label = CheckpointLabel(identity="i", as_of=1, entry="e", form="f")
                await link.checkpoints.save(label, b"state", head_bytes=2)
        return bus

    started = asyncio.run(begin())
    yield started
    asyncio.run(started.server.stop())


@pytest.fixture(scope="module")
def empty_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBus]:
    """Without any stream, for messages that would spoil one."""
    started = asyncio.run(start_bus(tmp_path_factory.mktemp("empty")))
    yield started
    asyncio.run(started.server.stop())


async def _has_log(link: Link) -> bool:
    try:
        await link.log.extent()
    except LogMissingError:
        return False
    return True


def subjects() -> list[str]:
    """One subject for each right of each user, and those that nobody has a right to."""
    named = {pattern for user in USERS for pattern in (*granted(user).publish, *granted(user).subscribe)}
    concrete = {pattern.replace("*", "x").replace(">", "x") for pattern in named}
    return sorted(concrete | set(FORBIDDEN))


@pytest.mark.parametrize("user", USERS, ids=IDS)
async def test_a_user_may_publish_what_its_role_needs_and_nothing_else(empty_bus: LockedBus, user: BusUser) -> None:
    async with empty_bus.raw(user) as raw:
        assert await raw.refused_to_publish(subjects()) == beyond(granted(user).publish, subjects())


@pytest.mark.parametrize("user", USERS, ids=IDS)
async def test_a_user_may_hear_what_its_role_needs_and_nothing_else(empty_bus: LockedBus, user: BusUser) -> None:
    wide = [">", "pm.>", "pm.*.kv.*", "_INBOX.>", "$JS.>", "$KV.>", "$SYS.>", "_R_.>"]
    tried = [*wide, *subjects()]
    async with empty_bus.raw(user) as raw:
        assert await raw.refused_to_hear(tried) == beyond(granted(user).subscribe, tried)


async def test_nobody_in_particular_gets_in(bus: LockedBus) -> None:
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        async with bus.raw(None):
            pass


def test_seeds_are_their_owners_alone(bus: LockedBus) -> None:
    found = [
        bus.credentials.directory,
        *bus.credentials.directory.rglob("*.nk"),
        *bus.credentials.directory.rglob("*/"),
    ]

    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700, 0o600}


# What a role must be able to do: as our processes do it.


async def entries_until(link: Any, last: int, **options: Any) -> list[LogEntry]:
    found: list[LogEntry] = []
    async for entry in link.log.read(1, **options):
        found.append(entry)
        if entry.sequence >= last:
            return found
    return found


@pytest.mark.parametrize("user", USERS, ids=IDS)
async def test_all_but_workers_and_other_routers_read_the_log_of_each_pool(bus: LockedBus, user: BusUser) -> None:
    if user.role in (BusRole.WORKER, BusRole.ROUTER):
        pytest.skip("they do not read")
    for pool in POOLS:
        async with asyncio.timeout(10), bus.link(user, pool) as link:
            extent = await link.log.extent()
            found = await entries_until(link, extent.last)

            assert extent.last
            assert [entry.sequence for entry in found] == list(range(1, extent.last + 1))


async def test_a_worker_writes_about_its_instance_and_answers_for_it(bus: LockedBus) -> None:
    async def answer(command: Any, reply: Reply) -> None:
        await reply(b"seen")

    resync = resync_subject(POOL, InstanceId(WORKER.name))
    async with bus.link(WORKER) as worker, bus.link(SCHEDULER) as scheduler:
        first = await worker.log.append(stored(WORKER.name, 1, [1]))
        assert await worker.log.append(joined(WORKER.name)) == first + 1
        async with worker.commands.serve(resync, answer):
            request = ResyncCache(instance=InstanceId(WORKER.name), reason="test")
            for _ in range(3):  # each is answered, and each answer is allowed once
                with pytest.raises(CommandTimeoutError, match="not understood"):  # b"seen" is no command
                    await scheduler.commands.request(resync, request, timeout=WallSeconds(2))


async def test_a_workers_heartbeat_is_answered_in_its_own_account_and_only_about_its_instance(bus: LockedBus) -> None:
    heard: list[str] = []

    async def note(command: Any, reply: Reply) -> None:
        heard.append(reply.subject)
        await reply(HeartbeatNoted(log=True))

    heartbeat = NoteHeartbeat(report=reported(WORKER.name, 0, []))
    own, anothers = heartbeat_subject(POOL, WORKER.name), heartbeat_subject(POOL, "engine-2")
    async with bus.link(SCHEDULER) as scheduler, bus.link(WORKER) as worker:
        with pytest.raises(NoResponderError):
            await worker.commands.request(own, heartbeat, timeout=WallSeconds(2))
        async with scheduler.commands.serve(heartbeat_subject(POOL, "*"), note):
            for _ in range(3):
                answer = await worker.commands.request(own, heartbeat, timeout=WallSeconds(2))
                assert answer == HeartbeatNoted(log=True)
            with pytest.raises((NoResponderError, CommandTimeoutError)):
                await worker.commands.request(anothers, heartbeat, timeout=WallSeconds(0.5))
    assert heard == [own] * 3


async def test_an_operator_drains_under_its_own_name(bus: LockedBus) -> None:
    served: list[str] = []

    async def drain(command: Any, reply: Reply) -> None:
        served.append(reply.subject)
        await reply(DrainAnswered(instance=command.instance, draining=True))

    command = DrainInstance(instance=InstanceId("engine-1"), reason="test")
    async with bus.link(SCHEDULER) as scheduler, bus.link(ALICE) as alice, bus.link(SCALER) as scaler:  # noqa: SIM117
        async with scheduler.commands.serve(admin_subject(POOL, "drain", "*"), drain):
            for link, actor in ((alice, "alice"), (scaler, "scaler")):
                await link.commands.request(admin_subject(POOL, "drain", actor), command, timeout=WallSeconds(2))
            with pytest.raises((CommandTimeoutError, NoResponderError)):
                await alice.commands.request(admin_subject(POOL, "drain", "bob"), command, timeout=WallSeconds(0.3))

    assert served == [admin_subject(POOL, "drain", "alice"), admin_subject(POOL, "drain", "scaler")]


async def test_a_scaler_that_follows_tells_the_acting_one_and_sets_no_other_name(bus: LockedBus) -> None:
    async def answer(_command: Any, reply: Reply) -> None:
        await reply(DrainAnswered(instance=InstanceId("engine-1"), draining=False))

    told = ScalePool(size_read=True)
    async with bus.link(SCALER) as acting, bus.link(SCALER) as following:  # noqa: SIM117
        async with acting.commands.serve(admin_subject(POOL, "scale", "*"), answer):
            await following.commands.request(admin_subject(POOL, "scale", "scaler"), told, timeout=WallSeconds(2))
            with pytest.raises((CommandTimeoutError, NoResponderError)):
                await following.commands.request(admin_subject(POOL, "scale", "alice"), told, timeout=WallSeconds(0.3))


async def test_an_admin_shows_changes_saves_and_deletes_every_stream_by_the_program_of_nats(bus: LockedBus) -> None:
    """What docs/upgrades.md, data.md and credentials.md do with it."""
    async with bus.raw(ADMIN) as admin:
        names = (await admin.call("$JS.API.STREAM.NAMES"))["streams"]
        described = await admin.call(f"$JS.API.STREAM.INFO.{LOG}")
        changed = await admin.call(f"$JS.API.STREAM.UPDATE.{LOG}", described["config"])
        saved = await admin.call(f"$JS.API.STREAM.SNAPSHOT.KV_pointsman-{POOL}", {"deliver_subject": "_INBOX.saved"})
        made = await admin.call("$JS.API.STREAM.CREATE.OLD", {"name": "OLD", "subjects": ["old"]})
        deleted = await admin.call("$JS.API.STREAM.DELETE.OLD")

    assert {LOG, f"KV_pointsman-{POOL}", f"OBJ_pointsman-{POOL}"} <= set(names)
    assert not [answer for answer in (described, changed, saved, made, deleted) if "error" in answer]
    assert deleted["success"]


async def test_another_router_asks_for_overlap_in_its_pool_and_one_scheduler_answers(bus: LockedBus) -> None:
    answered: list[bytes] = []

    async def answer(payload: bytes, reply: Reply) -> None:
        answered.append(payload)
        await reply(OverlapRefused(reason="invalid", detail="test"))

    request = OverlapRequest(prompts=[OverlapPrompt(token_ids=[1])])
    subject = command_subject(POOL, "overlap")
    async with bus.link(SCHEDULER) as one, bus.link(SCHEDULER) as two, bus.link(ROUTERS[0]) as router:
        async with (
            one.commands.serve_payloads(subject, answer, queue="overlap"),
            two.commands.serve_payloads(subject, answer, queue="overlap"),
        ):
            for _ in range(3):
                await router.commands.request(subject, request, timeout=WallSeconds(2))
        async with bus.link(ROUTERS[1], POOLS[1]) as stranger:
            with pytest.raises((CommandTimeoutError, NoResponderError)):
                await stranger.commands.request(subject, request, timeout=WallSeconds(0.3))

    assert len(answered) == 3


async def test_ingress_and_scaler_write_their_events(bus: LockedBus) -> None:
    probed = InstanceProbed(at=1.0, instance=InstanceId("engine-1"), epoch=Epoch(1), parity=True, detail="")
    decided = ScaleDecided(at=1.0, number=1, current=1, wanted=2, reason="", policy="manual", settings={})
    async with bus.link(INGRESS) as ingress, bus.link(SCALER) as scaler:
        await ingress.log.append(probed)
        await scaler.log.append(decided)
        lease = await scaler.scaler_lease.look()
        await scaler.scaler_lease.put("a", Term(1), after=0 if lease is None else lease.revision)


async def test_people_and_services_without_an_index_read_checkpoints(bus: LockedBus) -> None:
    for user in (READER, ALICE, SCALER, BusUser(BusRole.REBALANCER)):
        async with bus.link(user) as link:
            (label,) = await link.checkpoints.labels()
            assert await link.checkpoints.load(label) == b"state"
            assert await link.checkpoints.load_head(label) == b"st"


async def test_others_wait_until_a_scheduler_has_made_the_log(tmp_path: Path) -> None:
    async with locked_bus(tmp_path) as bus, bus.link(WORKER) as worker:
        writing = asyncio.create_task(worker.log.append(stored(WORKER.name, 1, [1])))
        with pytest.raises(LogMissingError):
            await worker.log.extent()
        async with bus.link(SCHEDULER):
            assert await writing == 1


# What the server would do for somebody who may not do it himself.


async def victims(bus: LockedBus) -> dict[str, Any]:
    """What an attack could change: entries by subject of both logs, and the buckets. By the scheduler's own rights."""
    found: dict[str, Any] = {}
    for pool in POOLS:
        async with bus.link(SCHEDULER, pool) as link:
            extent = await link.log.extent()
            for entry in await entries_until(link, extent.last):
                found[entry.subject] = found.get(entry.subject, 0) + 1
            found[f"lease of {pool}"] = await link.lease.look()
            found[f"checkpoints of {pool}"] = await link.checkpoints.labels()
    return found


TARGETS = [
    leader_subject(POOLS[0]), leader_subject(POOLS[1]), "pm.default.fleet.engine-2", "pm.default.kv.engine-2",
    "pm.coder.fleet.engine-3", "pm.default.access", "pm.default.cmd.drain.alice", "pm.default.cmd.resync.engine-2",
    "pm.default.cmd.fleet", "$KV.pointsman-default.leader", "$KV.pointsman-default.scaler", "$O.pointsman-default.C.x",
    "$JS.API.STREAM.CREATE.EVIL", "POINTSMAN.API.STREAM.CREATE.EVIL", "$JS.API.STREAM.PURGE.OBJ_pointsman-default",
    "_INBOX.scheduler.x", "_INBOX.ingress.x", "_INBOX.operator.alice.x", "_R_.x.y",
]  # fmt: skip
EVIL_STREAM = json.dumps({"name": "EVIL", "subjects": ["evil.>"], "storage": "memory"}).encode()


async def test_a_workers_reply_subjects_reach_nothing(bus: LockedBus) -> None:
    """The server acknowledges a write to whatever subject the writer names."""
    before = await victims(bus)
    async with bus.raw(WORKER) as raw:
        for target in TARGETS:
            for subject in ("pm.default.kv.engine-1", "pm.default.fleet.engine-1"):
                await raw.publish(subject, EVIL_STREAM, reply=target)
            await raw.publish(f"POINTSMAN.API.STREAM.INFO.{LOG}", b"", reply=target)
        await raw.settled()

    own = {"pm.default.kv.engine-1", "pm.default.fleet.engine-1"}
    after = await victims(bus)
    assert {k: v for k, v in after.items() if k not in own} == {k: v for k, v in before.items() if k not in own}


async def test_a_readers_reply_subjects_reach_nothing(bus: LockedBus) -> None:
    """The server sends a stored message, here one that a worker has forged, to whatever subject the reader names."""
    forged = json.dumps({"type": "DrainInstance", "instance": "engine-1", "reason": "forged"}).encode()
    async with bus.raw(WORKER) as worker:
        sequences = []
        for payload in (EVIL_STREAM, forged, b""):
            answer = await worker.client.request("pm.default.kv.engine-1", payload, timeout=3)
            sequences.append(json.loads(answer.data)["seq"])
    before = await victims(bus)
    heard: list[Any] = []

    async def hear(command: Any, reply: Reply) -> None:
        heard.append(command)

    handler: CommandHandler = hear
    served = [admin_subject(POOL, "drain", "*"), command_subject(POOL, "fleet")]
    async with bus.link(SCHEDULER) as scheduler, bus.raw(READER) as reader, bus.raw(ALICE) as alice:  # noqa: SIM117
        async with scheduler.commands.serve(served[0], handler), scheduler.commands.serve(served[1], handler):
            for raw in (reader, alice):
                for target in TARGETS:
                    for sequence in sequences:
                        query = json.dumps({"seq": sequence}).encode()
                        await raw.publish(f"POINTSMAN.API.DIRECT.GET.{LOG}", query, reply=target)
                        await raw.publish(f"POINTSMAN.API.STREAM.MSG.GET.OBJ_pointsman-{POOL}", query, reply=target)
                await raw.settled()

    assert heard == []
    assert await victims(bus) == before


async def test_an_answer_goes_to_an_inbox_or_nowhere(bus: LockedBus) -> None:
    """The scheduler may write the log; whoever asks it something must not choose where its answer goes."""

    async def answer(command: Any, reply: Reply) -> None:
        await reply(DrainAnswered(instance=InstanceId("engine-1"), draining=True))

    before = await victims(bus)
    subject = command_subject(POOL, "fleet")
    payload = json.dumps({"type": DescribeFleet.__name__}).encode()
    async with bus.link(SCHEDULER) as scheduler, bus.raw(INGRESS) as ingress:  # noqa: SIM117
        async with scheduler.commands.serve("pm.default.cmd.route", answer), scheduler.commands.serve(subject, answer):
            for target in TARGETS:
                await ingress.publish("pm.default.cmd.route", payload, reply=target)
            await ingress.settled()

    assert await victims(bus) == before


async def test_a_stored_entry_delivered_to_a_command_is_no_command(bus: LockedBus) -> None:
    """A service that may read by consumers can have entries delivered anywhere, but under the subject they have."""
    forged = json.dumps({"type": "DrainInstance", "instance": "engine-1", "reason": "forged"}).encode()
    async with bus.raw(WORKER) as worker:
        answer = await worker.client.request("pm.default.kv.engine-1", forged, timeout=3)
        sequence = json.loads(answer.data)["seq"]
    heard: list[Any] = []

    async def hear(command: Any, reply: Reply) -> None:
        heard.append(command)

    target = admin_subject(POOL, "drain", "alice")
    async with bus.link(SCHEDULER) as scheduler, bus.raw(BusUser(BusRole.RECORDER)) as recorder:  # noqa: SIM117
        async with scheduler.commands.serve(admin_subject(POOL, "drain", "*"), hear):
            consumer = {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence, "ack_policy": "none"}
            for name, deliver in (("pushed", {"deliver_subject": target}), ("pulled", {})):
                config = {"name": name, "mem_storage": True, "inactive_threshold": 10**9, **consumer, **deliver}
                request = {"stream_name": LOG, "config": config, "action": "create"}
                assert "error" not in await recorder.call(f"$JS.API.CONSUMER.CREATE.{LOG}.{name}", request)
            await recorder.publish(f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.pulled", b"", reply=target)
            await recorder.settled()
            await asyncio.sleep(SETTLE_SECONDS)

    assert heard == []


async def test_headers_of_a_writer_do_not_change_what_people_read(bus: LockedBus) -> None:
    """A direct get answers with headers, and a stored message has headers of its own."""
    spoofed = {"Nats-Subject": leader_subject(POOL), "Nats-Sequence": "1", "Nats-Time-Stamp": "x", "Status": "404"}
    async with bus.raw(WORKER) as worker:
        await worker.publish("pm.default.kv.engine-1", b"{}", headers=spoofed)
        await worker.settled()
    async with asyncio.timeout(10), bus.link(READER) as link:
        extent = await link.log.extent()
        found = await entries_until(link, extent.last)

    assert found[-1].subject == "pm.default.kv.engine-1"
    assert [entry.sequence for entry in found] == list(range(1, extent.last + 1))


async def test_a_refusal_is_told(bus: LockedBus) -> None:
    listener = RememberingListener()
    async with bus.link(WORKER, listener=listener) as link:
        with pytest.raises((CommandTimeoutError, NoResponderError)):
            await link.commands.request("pm.default.cmd.fleet", DescribeFleet(), timeout=WallSeconds(0.3))
        await eventually(lambda: listener.forbidden_subjects == [("publish", "pm.default.cmd.fleet")])
