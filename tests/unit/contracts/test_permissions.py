"""The table of permissions, by itself: what no role may have, and that what a role asks of another account is offered."""

import itertools

import pytest

from pointsman.contracts.permissions import ANY_INSTANCE, Account, BusRole, BusUser, permissions_of, services
from pointsman.contracts.subjects import covers, log_subjects
from pointsman.primitives import PoolName
from tests.support.bus import POOLS, USERS, granted

SCHEDULER_ONLY = ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.PURGE")
NOBODY: tuple[str, ...] = (
    "STREAM.DELETE",
    "STREAM.MSG.DELETE",
    "STREAM.LIST",
    "STREAM.NAMES",
    "STREAM.SNAPSHOT",
    "STREAM.RESTORE",
)
NOBODY += ("CONSUMER.DELETE", "CONSUMER.DURABLE", "CONSUMER.LIST", "CONSUMER.NAMES", "CONSUMER.INFO", "META", "ACCOUNT")
IDS = [" ".join(filter(None, (user.role, user.pool, user.name))) for user in USERS]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b", "a.*", False),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        (">", "a.>", True),
    ],
)
def test_a_pattern_covers_what_matches_it(pattern: str, subject: str, *, expected: bool) -> None:
    assert covers(pattern, subject) is expected


@pytest.mark.parametrize("user", USERS, ids=IDS)
def test_only_the_scheduler_makes_streams_and_nobody_deletes(user: BusUser) -> None:
    refused = NOBODY if user.role is BusRole.SCHEDULER else NOBODY + SCHEDULER_ONLY
    calls = [subject for subject in granted(user).publish if "API" in subject]

    assert [call for call in calls if any(f"API.{one}" in call for one in refused)] == []


def test_the_scheduler_purges_checkpoints_only() -> None:
    purges = [subject for subject in granted(BusUser(BusRole.SCHEDULER)).publish if "PURGE" in subject]

    assert purges == [f"$JS.API.STREAM.PURGE.OBJ_pointsman-{pool}" for pool in POOLS]


@pytest.mark.parametrize(
    ("instance", "inbox", "spoken"), [("engine-1", "engine-1", "engine-1"), (ANY_INSTANCE, "_", "*")]
)
def test_a_worker_speaks_for_its_instance_or_for_any_and_cannot_read(instance: str, inbox: str, spoken: str) -> None:
    worker = BusUser(BusRole.WORKER, instance, POOLS[0])

    assert set(granted(worker).publish) == {
        f"pm.default.kv.{spoken}",
        f"pm.default.fleet.{spoken}",
        f"pm.default.cmd.heartbeat.{spoken}",
        "POINTSMAN.API.STREAM.INFO.POINTSMAN_default",
    }
    assert set(granted(worker).subscribe) == {
        f"_INBOX.worker.default.{inbox}.>",
        f"pm.default.cmd.resync.{spoken}",
    }


@pytest.mark.parametrize("user", USERS, ids=IDS)
def test_only_the_inbox_of_its_own_is_heard(user: BusUser) -> None:
    inboxes = [subject for subject in granted(user).subscribe if subject.startswith("_INBOX")]

    assert inboxes == [f"{user.inbox}.>"]


def test_no_inbox_contains_another() -> None:
    assert [(a, b) for a, b in itertools.permutations(USERS, 2) if covers(f"{a.inbox}.>", f"{b.inbox}.x")] == []


@pytest.mark.parametrize("user", USERS, ids=IDS)
def test_people_and_workers_never_name_a_whole_tree(user: BusUser) -> None:
    wide = [subject for subject in granted(user).publish if "*" in subject or ">" in subject]

    assert user.account is Account.FLEET or wide == (
        [] if user.name != ANY_INSTANCE else ["pm.coder.kv.*", "pm.coder.fleet.*", "pm.coder.cmd.heartbeat.*"]
    )


def test_people_write_no_entry_and_readers_send_no_command() -> None:
    logs = [subject for pool in POOLS for subject in log_subjects(pool)]
    reader, operator = granted(BusUser(BusRole.READER)), granted(BusUser(BusRole.OPERATOR, "alice"))

    for rights in (reader, operator):
        assert not any(covers(log, subject) for log in logs for subject in rights.publish)
    assert [subject for subject in reader.publish if ".cmd." in subject] == [f"pm.{pool}.cmd.fleet" for pool in POOLS]
    assert not any("ACCESS" in subject for subject in reader.publish)
    assert all(subject.endswith((".alice", "cmd.fleet")) for subject in operator.publish if subject.startswith("pm."))


@pytest.mark.parametrize("user", USERS, ids=IDS)
def test_what_a_user_of_another_account_asks_is_offered_there(user: BusUser) -> None:
    offered = [service.local for service in services() if service.to is user.account]

    if user.account is not Account.FLEET:
        assert granted(user).publish
        assert all(any(covers(local, subject) for local in offered) for subject in granted(user).publish)


def test_a_worker_of_one_pool_has_no_rights_in_another() -> None:
    rights = permissions_of(BusUser(BusRole.WORKER, "engine-1", PoolName("coder")), POOLS)

    assert not any("default" in subject for subject in (*rights.publish, *rights.subscribe))


def test_another_router_may_ask_for_overlap_in_its_pool_and_hears_its_answers_alone() -> None:
    rights = granted(BusUser(BusRole.ROUTER, "other", POOLS[0]))

    assert rights.publish == ("pm.default.cmd.overlap",)
    assert rights.subscribe == ("_INBOX.router.default.other.>",)
    assert not rights.responses


def test_besides_other_routers_only_ingresses_ask_for_overlap_and_only_schedulers_answer() -> None:
    asking = {user.role for user in USERS if "pm.default.cmd.overlap" in granted(user).publish}
    answering = {user.role for user in USERS if "pm.default.cmd.overlap" in granted(user).subscribe}

    assert (asking, answering) == ({BusRole.ROUTER, BusRole.INGRESS}, {BusRole.SCHEDULER})


def test_an_ingress_may_ask_whether_a_scheduler_lives() -> None:
    assert "pm.default.cmd.fleet" in granted(BusUser(BusRole.INGRESS)).publish
