"""What somebody tries who can reach the NATS port. Each attack says what it would cost and what would be different
afterwards (`effect`, as `Picture.differences` says it, or `told` if the attacker learned something).

On an open server each has its effect; a test shows it. With users none may have any.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import Identity, connect
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceDraining
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import message_id
from pointsman.primitives import Epoch, InstanceId, PoolName, Term
from tests.security.bus_world import (
    ACCESS,
    CHECKPOINTS,
    LEASE,
    LOG,
    MARK,
    OWN,
    POOL,
    VICTIM,
    WAIT_SECONDS,
    Attacker,
    BusWorld,
    inbox,
    log_config,
)

Run = Callable[[Attacker, BusWorld], Awaitable[bool | None]]


@dataclass(frozen=True, slots=True)
class BusAttack:
    """`run` returns whether the attacker learned something. `by_right`: roles for which it is no attack."""

    name: str
    cost: str
    effect: str
    run: Run
    by_right: tuple[str, ...] = ()
    closed_anyway: bool = False
    """Refused by an open server, too: by the settings of the streams."""


def event(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, "reason": MARK, **fields}).encode()


def says(subject: str, payload: bytes, **headers: str) -> Run:
    async def run(attacker: Attacker, world: BusWorld) -> None:
        await attacker.say(subject, payload, **headers)
        await attacker.settle()

    return run


def calls(call: str, **request: object) -> Run:
    async def run(attacker: Attacker, world: BusWorld) -> bool:
        return bool(await attacker.api(call, **request))

    return run


def overhears(subject: str, *, queue: str = "") -> Run:
    """Listens while the fleet talks: a grant to an ingress, a command, an entry of the log."""

    async def run(attacker: Attacker, world: BusWorld) -> bool:
        await attacker.listen(subject, queue)
        await world.services["scheduler"].publish(f"{inbox('ingress')}.abc.1", b"grant for another")
        await world.services["ingress"].publish(f"pm.{POOL}.cmd.route", b"route of another")
        await world.services["operator"].publish(f"pm.{POOL}.cmd.drain.alice", b"an operator's drain")
        for api in ("$JS.API.", "POINTSMAN.API."):
            await world.services["operator"].publish(f"{api}STREAM.INFO.{LOG}", reply=f"{inbox('operator')}.abc.1")
        await world.services["worker"].publish(OWN[0], b"{}", reply=f"{inbox('worker')}.abc.1")
        for service in world.services.values():
            await service.flush()
        await attacker.settle()
        return await attacker.has_heard()

    return run


def answered_at(subject: str, payload: bytes, reply: str) -> Run:
    """The server publishes its answer wherever a client asks it to, whatever that client may publish."""

    async def run(attacker: Attacker, world: BusWorld) -> None:
        for prefix in ("$JS.API.", "POINTSMAN.API.") if subject.startswith("$JS.API.") else ("",):
            await attacker.say(prefix + subject.removeprefix("$JS.API."), payload, reply=reply)
        await attacker.settle()
        await asyncio.sleep(WAIT_SECONDS)

    return run


async def _answers_route(attacker: Attacker, world: BusWorld) -> bool:
    """Serve `cmd.route` oneself: the first answer counts."""
    await attacker.listen(f"pm.{POOL}.cmd.route")
    subject = f"{inbox('ingress')}.forged.1"
    await world.services["ingress"].publish(f"pm.{POOL}.cmd.route", b'{"request":"of another"}', reply=subject)
    await world.services["ingress"].flush()
    await attacker.has_heard()
    await attacker.say(subject, event("RouteGranted", instance="evil", url="http://evil:1", term=0))
    await attacker.settle()
    return bool(attacker.heard)


_numbers = itertools.count(1)


async def _poisons_dedup(attacker: Attacker, world: BusWorld) -> bool:
    """Use up the message ids of a leader's next decisions: they would be acknowledged, and not stored."""
    instance = InstanceId("victim")
    decisions = [
        InstanceDraining(
            at=0.0, stamp=Stamp(term=Term(1), number=number, as_of=1), instance=instance, epoch=Epoch(1), reason="true"
        )
        for number in (next(_numbers) for _ in range(3))
    ]
    for decision in decisions:
        await attacker.ask(OWN[0], b"{}", Nats_Msg_Id=str(message_id(decision)))
    user, identity = BusUser(BusRole.SCHEDULER), Identity(credentials=world.scheduler_credentials)
    name, pool = "scheduler-1", PoolName(POOL)
    async with connect(world.url, pool, ScaledClock(), name=name, user=user, identity=identity) as link:
        written = [await link.log.append(decision) for decision in decisions]
    return not await world.stored(VICTIM, written)


async def _republishes(attacker: Attacker, world: BusWorld) -> None:
    """Store a command or a forged entry under one's own subject, and let the server copy it to another."""
    own = f"pm.{POOL}.fleet.engine-1"
    stored = json.loads(await attacker.ask(own, event("DrainInstance", instance="engine-2")) or b"{}")
    for subject in (f"pm.{POOL}.cmd.drain.alice", f"pm.{POOL}.fleet.engine-2", "$KV.POINTSMAN_ACCESS.key.evil"):
        for prefix in ("$JS.API.", "POINTSMAN.API."):
            request = json.dumps({"seq": stored.get("seq", 1)}).encode()
            await attacker.say(f"{prefix}DIRECT.GET.{LOG}", request, reply=subject)
            await attacker.say(f"{prefix}STREAM.MSG.GET.{LOG}", request, reply=subject)
    await attacker.settle()
    await asyncio.sleep(WAIT_SECONDS)


async def _consumes_into(attacker: Attacker, world: BusWorld) -> None:
    """A consumer of one's own whose messages are fetched for somebody else."""
    for name, subject in (
        ("p1", f"pm.{POOL}.fleet.engine-2"),
        ("p2", "pm.other.fleet.engine-2"),
        ("p3", "$KV.POINTSMAN_ACCESS.tenants"),
    ):
        config = {"name": name, "ack_policy": "none", "deliver_policy": "all"}
        for prefix in ("$JS.API.", "POINTSMAN.API."):
            made = json.dumps({"stream_name": LOG, "config": config, "action": "create"}).encode()
            await attacker.say(f"{prefix}CONSUMER.CREATE.{LOG}.{name}", made, reply=subject)
            await attacker.say(f"{prefix}CONSUMER.MSG.NEXT.{LOG}.{name}", b"1", reply=subject)
    await attacker.settle()
    await asyncio.sleep(WAIT_SECONDS)


async def _pushes_into(attacker: Attacker, world: BusWorld) -> bool:
    made = False
    for number, subject in enumerate((f"pm.{POOL}.cmd.route", "pm.other.leader", "$JS.API.STREAM.DELETE." + LOG)):
        config = {
            "name": f"push{number}",
            "deliver_subject": subject,
            "ack_policy": "none",
            "inactive_threshold": 10**10,
        }
        answer = await attacker.api(
            f"CONSUMER.CREATE.{LOG}.push{number}", stream_name=LOG, config=config, action="create"
        )
        made = made or bool(answer)
    return made


async def _asks_system(attacker: Attacker, world: BusWorld) -> bool:
    subjects = (
        "$SYS.REQ.SERVER.PING.CONNZ",
        "$SYS.REQ.SERVER.PING.VARZ",
        "$SYS.REQ.ACCOUNT.FLEET.CONNZ",
        "$SYS.REQ.CLAIMS.LIST",
    )
    return any([await attacker.ask(subject) for subject in subjects])


async def _floods(attacker: Attacker, world: BusWorld) -> bool:
    """Large entries on the log of everybody push the oldest out."""
    ack = await attacker.ask(f"pm.{POOL}.kv.{MARK}", b"x" * (1 << 20))
    return b'"seq"' in ack


async def _names_nobody_expects(attacker: Attacker, world: BusWorld) -> None:
    for subject in (
        f"pm.{POOL}.fleet.{'x' * 3000}",
        f"pm.{POOL}.fleet.*",
        f"pm.{POOL}.fleet.>",
        f"pm.{POOL}.kv.\u202eevil",
        f"pm.{POOL}.request.a.b",
    ):
        await attacker.say(subject, event("InstanceLeft"))
    await attacker.settle()


def _stream(name: str, **config: object) -> Run:
    return calls(f"STREAM.CREATE.{name}", name=name, storage="memory", **config)


CMD, FLEET = f"pm.{POOL}.cmd", f"pm.{POOL}.fleet"
KV = f"pm.{POOL}.kv"
HUGE_TERM = 2**62
OF_A_POOL = ("pool",)
"""A worker that follows the engines of a pool may say anything about any instance there."""

ATTACKS: tuple[BusAttack, ...] = (
    # Speaking for others
    BusAttack("join a forged instance", "all prompts, and the engines' API key", "log", says(f"{FLEET}.evil", event("InstanceJoined", instance="evil", url="http://evil:1")), by_right=OF_A_POOL),
    BusAttack("report for a forged instance", "every placement", "log", says(f"{FLEET}.evil", event("InstanceReported", instance="evil")), by_right=OF_A_POOL),
    BusAttack("say that another instance left", "its requests, its cache", "log", says(f"{FLEET}.engine-2", event("InstanceLeft", instance="engine-2", epoch=1)), by_right=OF_A_POOL),
    BusAttack("cache events of another instance", "wrong placements", "log", says(f"{KV}.engine-2", event("BlocksStored", instance="engine-2")), by_right=OF_A_POOL),
    BusAttack("speak in another pool", "another model's prompts", "log", says("pm.other.fleet.engine-1", event("InstanceJoined", instance="engine-1")), by_right=("other", "other pool")),
    BusAttack("end another's request", "an answer lost", "log", says(f"pm.{POOL}.request.r1", event("RequestFailed", request="r1")), by_right=("ingress",)),
    BusAttack("mark writes as lost", "a rebuild by everybody", "log", says(f"pm.{POOL}.lost", event("WritesLost", writer="x")), by_right=("ingress",)),
    BusAttack("names that nobody expects", "crashes of readers", "log", _names_nobody_expects, by_right=OF_A_POOL),
    # Leading
    BusAttack("forge an election with a huge term", "no scheduler decides any more", "log", says(f"pm.{POOL}.leader", event("LeaderElected", term=HUGE_TERM, scheduler="evil"))),
    BusAttack("take the lease", "no scheduler decides any more", "buckets", says(f"$KV.pointsman-{POOL}.leader", b'{"holder":"xyzzy","term":99}')),
    BusAttack("forge a decision", "drained instances, false grants", "log", says(f"{FLEET}.engine-2", event("InstanceDraining", instance="engine-2", stamp={"term": 1, "number": 9, "as_of": 1})), by_right=OF_A_POOL),
    BusAttack("forge a scaling decision", "engines started or stopped", "log", says(f"pm.{POOL}.scale", event("ScaleDecided", wanted=0))),
    BusAttack("forge tenants' limits", "one's own quota", "log", says(f"pm.{POOL}.access", event("TenantPoliciesSet"))),
    BusAttack("forge a checkpoint", "a false state in every new leader", "buckets", says(f"$O.pointsman-{POOL}.M.slot", event("x"))),
    # Commands
    BusAttack("answer requests for a place", "any prompt at will (term 0)", "heard by ingress", _answers_route),
    BusAttack("forge a grant into an inbox", "a prompt", "heard by ingress", says(f"{inbox('ingress')}.guess.1", event("RouteGranted", term=0))),
    BusAttack("drain an instance", "the fleet idle", "heard by scheduler", says(f"{CMD}.drain.alice", event("DrainInstance", instance="engine-1")), by_right=("operator",)),
    BusAttack("act in another operator's name", "the record of who did it", "heard by scheduler", says(f"{CMD}.keys.bob", event("ChangeApiKey", action="create"))),
    BusAttack("act as the scaler", "drained instances", "heard by scheduler", says(f"{CMD}.drain.scaler", event("DrainInstance", instance="engine-1"))),
    BusAttack("scale the pool", "engines stopped, or money", "heard by scaler", says(f"{CMD}.scale.alice", event("ScalePool", wanted=0)), by_right=("operator",)),
    BusAttack("change limits", "one's own quota", "heard by scheduler", says(f"{CMD}.tenants.alice", event("SetTenantPolicies")), by_right=("operator",)),
    BusAttack("create a key", "a client's access", "heard by scheduler", says(f"{CMD}.keys.alice", event("ChangeApiKey", action="create")), by_right=("operator",)),
    BusAttack("ask for places", "requests that nobody sent", "heard by scheduler", says(f"{CMD}.route", event("RouteRequest", request="r9")), by_right=("ingress",)),
    BusAttack("cancel others' requests", "answers lost", "heard by scheduler", says(f"{CMD}.cancel", event("CancelRequest", request="r1")), by_right=("ingress",)),
    BusAttack("follow nobody's requests", "running requests ended", "heard by scheduler", says(f"{CMD}.follow", event("FollowRequests", requests=[])), by_right=("ingress",)),
    BusAttack("move requests", "load where the attacker wants", "heard by scheduler", says(f"{CMD}.migrate", event("MigrateRequests"))),
    BusAttack("keep a dead instance in the fleet", "requests that wait there", "heard by scheduler", says(f"{CMD}.heartbeat.engine-2", event("NoteHeartbeat")), by_right=OF_A_POOL),
    BusAttack("make workers resynchronise", "load", "heard by worker", says(f"{CMD}.resync.engine-1", event("ResyncCache"))),
    # Listening
    BusAttack("read everything", "ids, tenants, addresses, keys of prefixes", "told", overhears(">")),
    BusAttack("read grants to ingresses", "addresses", "told", overhears("_INBOX.>")),
    BusAttack("read an ingress's inbox", "addresses", "told", overhears(f"{inbox('ingress')}.>")),
    BusAttack(
        "read an operator's inbox", "the fleet", "told", overhears(f"{inbox('operator')}.>"), by_right=("operator",)
    ),
    BusAttack("read a worker's inbox", "positions in the log", "told", overhears(f"{inbox('worker')}.>"), by_right=("worker",)),
    BusAttack("read commands", "what operators do", "told", overhears(f"pm.{POOL}.cmd.>")),
    BusAttack("take commands from the scheduler", "requests without a place", "told", overhears(f"{CMD}.route", queue="q")),
    BusAttack("take admin commands", "operators' commands lost", "told", overhears(f"{CMD}.drain.*", queue="*.q")),
    # Streams
    BusAttack("delete the log", "history, and every cached prefix", "streams", calls(f"STREAM.DELETE.{LOG}")),
    BusAttack("delete the keys", "every client's access", "buckets", calls(f"STREAM.DELETE.{ACCESS}")),
    BusAttack("purge the log", "history", "log", calls(f"STREAM.PURGE.{LOG}"), closed_anyway=True),
    BusAttack("purge the checkpoints", "a long start", "buckets", calls(f"STREAM.PURGE.{CHECKPOINTS}")),
    BusAttack("purge the lease", "an election", "buckets", calls(f"STREAM.PURGE.{LEASE}")),
    BusAttack("delete an entry", "history", "log", calls(f"STREAM.MSG.DELETE.{LOG}", seq=1), closed_anyway=True),
    BusAttack("shorten the log", "history", "streams", calls(f"STREAM.UPDATE.{LOG}", **log_config(POOL) | {"max_msgs": 1})),
    BusAttack("publish the log elsewhere", "everything in it, for ever", "streams", calls(f"STREAM.UPDATE.{LOG}", **log_config(POOL) | {"republish": {"src": ">", "dest": "evil.>"}})),
    BusAttack("capture commands in a stream", "all commands; its acknowledgements answer them", "told", _stream("EVIL", subjects=[f"{CMD}.>"])),
    BusAttack("mirror the log", "everything in it", "told", _stream("MIRROR", mirror={"name": LOG})),
    BusAttack("source the log into another", "everything in it", "told", _stream("SOURCE", sources=[{"name": LOG}])),
    BusAttack("snapshot the log", "everything in it", "told", calls(f"STREAM.SNAPSHOT.{LOG}", deliver_subject="evil", no_consumers=True)),
    BusAttack("restore a stream", "a false log", "told", calls("STREAM.RESTORE.EVIL2", config={"name": "EVIL2", "subjects": ["evil2"], "storage": "file"}, state={"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0, "consumer_count": 0, "first_ts": "2026-01-01T00:00:00Z", "last_ts": "2026-01-01T00:00:00Z"})),
    BusAttack("list streams", "names of pools", "told", calls("STREAM.LIST")),
    BusAttack("list API keys", "digests, tenants", "told", calls(f"STREAM.MSG.GET.{ACCESS}", last_by_subj="$KV.POINTSMAN_ACCESS.key.k1"), by_right=("operator", "ingress")),
    BusAttack("read the log by message", "tenants, ids, prefix keys", "told", calls(f"STREAM.MSG.GET.{LOG}", seq=1), by_right=("reader", "operator")),
    BusAttack("push the log to others", "a command from the log's text", "told", _pushes_into),
    BusAttack("write an API key", "a client's access", "buckets", says("$KV.POINTSMAN_ACCESS.key.evil", event("ApiKey"))),
    BusAttack("overwrite the limits", "everybody's limits", "buckets", says("$KV.POINTSMAN_ACCESS.tenants", event("x"))),
    BusAttack("an account's purge", "every stream", "told", calls("ACCOUNT.PURGE.$G"), closed_anyway=True),
    BusAttack("step the meta leader down", "an interruption", "told", calls("META.LEADER.STEPDOWN"), closed_anyway=True),
    BusAttack("ask the server about its clients", "addresses", "told", _asks_system),
    # By replies: the server answers where it is told to
    BusAttack("acknowledge into the leader's subject", "no leader", "log", answered_at(f"{KV}.engine-1", b"{}", f"pm.{POOL}.leader")),
    BusAttack("acknowledge into the lease", "no leader", "buckets", answered_at(f"{KV}.engine-1", b"{}", f"$KV.pointsman-{POOL}.leader")),
    BusAttack("acknowledge into the limits", "everybody's limits", "buckets", answered_at(f"{KV}.engine-1", b"{}", "$KV.POINTSMAN_ACCESS.tenants")),
    BusAttack("information into another's subject", "dead letters, a lost lease", "buckets", answered_at(f"$JS.API.STREAM.INFO.{LOG}", b"", f"$KV.pointsman-{POOL}.leader")),
    BusAttack("let the server copy an entry", "any command, key or entry", "buckets", _republishes),
    BusAttack("fetch for somebody else", "entries in other logs", "buckets", _consumes_into),
    # By headers
    BusAttack("use up message ids", "the leader's decisions are not stored", "told", _poisons_dedup, closed_anyway=True),
    BusAttack("roll the log up", "history", "streams", says(f"{KV}.engine-1", b"{}", Nats_Rollup="all"), closed_anyway=True),
    BusAttack("an entry that expires", "a hole", "streams", says(f"{KV}.engine-1", b"{}", Nats_TTL="1s"), closed_anyway=True),
    BusAttack("a message for later", "a command from the server itself", "heard by scheduler", says(f"{KV}.engine-1", event("DrainInstance"), Nats_Schedule="@every 1s", Nats_Schedule_Target=f"{CMD}.drain.alice"), closed_anyway=True),
    BusAttack("fill the log", "history", "told", _floods, by_right=OF_A_POOL),
)  # fmt: skip
