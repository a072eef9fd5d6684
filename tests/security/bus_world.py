"""A nats-server with two pools' logs, leases, checkpoints and API keys, and those who listen there. What an attack did is
the difference between two pictures of all that: an attack without a difference had no effect."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

POOL, OTHER = "default", "other"
LOG, OTHER_LOG = f"POINTSMAN_{POOL}", f"POINTSMAN_{OTHER}"
LEASE, CHECKPOINTS, ACCESS = f"KV_pointsman-{POOL}", f"OBJ_pointsman-{POOL}", "KV_POINTSMAN_ACCESS"
STREAMS = (LOG, OTHER_LOG, LEASE, CHECKPOINTS, ACCESS)
OWN = (f"pm.{POOL}.kv.engine-1", f"pm.{POOL}.fleet.engine-1")
"""Of the worker whose credential was stolen: what it says there is its right, if not always true."""
VICTIM = f"pm.{POOL}.fleet.victim"
"""Here a true leader writes while an attack is under way."""
MARK = "xyzzy"
"""Part of whatever an attack leaves behind."""
WAIT_SECONDS = 0.1


def log_config(pool: str) -> dict[str, Any]:
    kinds = ("kv.*", "fleet.*", "request.*", "scale", "leader", "lost", "access")
    return {
        "name": f"POINTSMAN_{pool}",
        "subjects": [f"pm.{pool}.{kind}" for kind in kinds],
        "storage": "memory",
        "deny_delete": True,
        "deny_purge": True,
        "allow_direct": True,
        "compression": "s2",
        "duplicate_window": 120_000_000_000,
        "max_age": 7 * 24 * 3600 * 1_000_000_000,
    }


def bucket_config(name: str, *subjects: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "subjects": list(subjects), "discard": "new", "allow_direct": True, **more}


CONFIGS = {
    LOG: log_config(POOL),
    OTHER_LOG: log_config(OTHER),
    LEASE: bucket_config(
        LEASE,
        f"$KV.pointsman-{POOL}.>",
        storage="memory",
        max_msgs_per_subject=1,
        deny_delete=True,
        allow_rollup_hdrs=True,
    ),
    CHECKPOINTS: bucket_config(
        CHECKPOINTS, f"$O.pointsman-{POOL}.C.>", f"$O.pointsman-{POOL}.M.>", storage="memory", allow_rollup_hdrs=True
    ),
    ACCESS: bucket_config(ACCESS, "$KV.POINTSMAN_ACCESS.>", storage="memory", max_msgs_per_subject=1, deny_delete=True),
}
FIRST_ENTRIES = {
    f"pm.{POOL}.fleet.engine-1": b'{"type":"InstanceJoined","instance":"engine-1"}',
    f"pm.{POOL}.leader": b'{"type":"LeaderElected","term":1}',
    f"$KV.pointsman-{POOL}.leader": b'{"holder":"scheduler-1","term":1}',
    "$KV.POINTSMAN_ACCESS.tenants": b'{"tenants":{}}',
    "$KV.POINTSMAN_ACCESS.key.k1": b'{"digest":"secret-digest"}',
    f"$O.pointsman-{POOL}.M.slot": b'{"name":"slot"}',
}
COMMANDS = ("route", "handover", "follow", "cancel", "migrate", "fleet")


@dataclass
class Picture:
    """Of all streams: settings and entries. And what services have been sent since the picture before."""

    streams: dict[str, dict[str, Any]]
    entries: dict[str, list[tuple[int, str, str]]]
    heard: list[tuple[str, str]]

    def differences(self, before: "Picture") -> set[str]:
        """In words: `log`, `buckets`, `streams`, and which service heard something."""
        found = {f"heard by {who}" for who, _ in self.heard}
        if self.streams != before.streams:
            found.add("streams")
        for stream in {*self.entries, *before.entries}:
            if self.entries.get(stream) != before.entries.get(stream):
                found.add("log" if stream in (LOG, OTHER_LOG) else "buckets")
        return found


@dataclass
class BusWorld:
    """`services`: connections of the true services, by role, and of an administrator who looks at everything."""

    url: str
    services: dict[str, Client]
    scheduler_credentials: str = ""
    heard: list[tuple[str, str]] = field(default_factory=list)

    async def set_up(self) -> None:
        for config in CONFIGS.values():
            await self.api(f"STREAM.CREATE.{config['name']}", config)
        for subject, payload in FIRST_ENTRIES.items():
            await self.services["administrator"].request(subject, payload, timeout=2)

    async def set_back(self) -> None:
        """As at first; only an open server lets this be done."""
        listed = await self.api("STREAM.NAMES", {})
        for name in listed.get("streams") or []:
            await self.api(f"STREAM.DELETE.{name}", {})
        await self.set_up()
        self.heard.clear()

    async def listen(self) -> None:
        """Every service hears what it hears in a fleet."""
        for command in COMMANDS:
            await self._hear("scheduler", f"pm.{POOL}.cmd.{command}")
        for action in ("drain", "keys", "tenants"):
            await self._hear("scheduler", f"pm.{POOL}.cmd.{action}.*")
        await self._hear("scheduler", f"pm.{POOL}.cmd.heartbeat.*")
        await self._hear("scaler", f"pm.{POOL}.cmd.scale.*")
        await self._hear("worker", f"pm.{POOL}.cmd.resync.engine-1")
        for role in self.services:
            await self._hear(role, inbox(role) + ".>")

    async def picture(self) -> Picture:
        for service in self.services.values():
            await service.flush()
        await asyncio.sleep(0.02)
        streams: dict[str, dict[str, Any]] = {}
        entries: dict[str, list[tuple[int, str, str]]] = {}
        for name in STREAMS:
            info = await self.api(f"STREAM.INFO.{name}", {})
            if "config" not in info:
                streams[name] = info["error"]
                continue
            streams[name] = {**info["config"], "consumers": info["state"].get("consumer_count", 0)}
            found = [
                await self._entry(name, s) for s in range(info["state"]["first_seq"], info["state"]["last_seq"] + 1)
            ]
            entries[name] = [entry for entry in found if entry is not None]
        heard, self.heard[:] = list(self.heard), []
        return Picture(streams, entries, heard)

    async def stored(self, subject: str, sequences: list[int]) -> bool:
        """Whether these entries of the log are this subject's."""
        found = [await self.api(f"STREAM.MSG.GET.{LOG}", {"seq": sequence}) for sequence in sequences]
        return all(entry.get("message", {}).get("subject") == subject for entry in found)

    async def api(self, call: str, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self.services["administrator"].request(
            f"$JS.API.{call}", json.dumps(request).encode(), timeout=2
        )
        told: dict[str, Any] = json.loads(answer.data)
        return told

    async def _entry(self, stream: str, sequence: int) -> tuple[int, str, str] | None:
        message = (await self.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence})).get("message")
        return None if message is None or (stream == LOG and message["subject"] in (*OWN, VICTIM)) else _shown(message)

    async def _hear(self, role: str, subject: str) -> None:
        async def on_message(message: Msg) -> None:
            if MARK.encode() in message.data:
                self.heard.append((role, message.subject))

        await self.services[role].subscribe(subject, cb=on_message)


def inbox(role: str) -> str:
    return {
        "worker": f"_INBOX.worker.{POOL}.engine-1",
        "other": f"_INBOX.worker.{OTHER}.engine-1",
        "pool": f"_INBOX.worker.{POOL}._",
        "other pool": f"_INBOX.worker.{OTHER}._",
        "operator": "_INBOX.operator.alice",
        "router": f"_INBOX.router.{POOL}.other",
    }.get(role, f"_INBOX.{role}")


def _shown(message: dict[str, Any]) -> tuple[int, str, str]:
    return message["seq"], message["subject"], base64.b64decode(message.get("data", "")).decode("latin-1")


@dataclass
class Attacker:
    """A plain NATS client with somebody's credential. `api`: where the JetStream API is for it."""

    client: Client
    name: str
    inbox: str
    heard: list[tuple[str, bytes]] = field(default_factory=list)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def say(self, subject: str, payload: bytes = b"", *, reply: str = "", **headers: str) -> None:
        told = {name.replace("_", "-"): value for name, value in headers.items()} or None
        with contextlib.suppress(nats.errors.Error):
            await self.client.publish(subject, payload, reply=reply, headers=told)

    async def ask(self, subject: str, payload: bytes = b"", **headers: str) -> bytes:
        """The answer; nothing, if there is none or it is refused."""
        told = {name.replace("_", "-"): value for name, value in headers.items()} or None
        self.refused.clear()
        asking = asyncio.ensure_future(self.client.request(subject, payload, timeout=0.4, headers=told))
        refusing = asyncio.ensure_future(self.refused.wait())
        await asyncio.wait({asking, refusing}, return_when=asyncio.FIRST_COMPLETED)
        refusing.cancel()
        if not asking.done():
            asking.cancel()
            return b""
        return b"" if asking.exception() else asking.result().data

    async def api(self, call: str, **request: Any) -> dict[str, Any]:
        """By each name under which the JetStream API is known."""
        payload = json.dumps(request).encode()
        for prefix in ("$JS.API.", "POINTSMAN.API."):
            answer = await self.ask(prefix + call, payload)
            if answer and "error" not in (told := json.loads(answer)):
                return dict(told)
        return {}

    async def listen(self, subject: str, queue: str = "") -> None:
        async def on_message(message: Msg) -> None:
            self.heard.append((message.subject, message.data))

        self.heard.clear()
        self.refused.clear()
        with contextlib.suppress(nats.errors.Error):
            await self.client.subscribe(subject, queue=queue, cb=on_message)
        await self.settle()

    async def has_heard(self) -> bool:
        """What the server has sent by now is delivered by a task, which comes to its turn, unless it was refused."""
        for _ in range(500):
            if self.heard or self.refused.is_set():
                break
            await asyncio.sleep(0.01)
        return bool(self.heard)

    async def settle(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self.client.flush()


@asynccontextmanager
async def attacker(url: str, name: str, **credential: Any) -> AsyncIterator[Attacker]:
    refused = asyncio.Event()

    async def on_error(error: Exception) -> None:
        refused.set()

    prefix = inbox(name)
    client = await nats.connect(
        url, error_cb=on_error, inbox_prefix=prefix, allow_reconnect=False, connect_timeout=2, **credential
    )
    try:
        yield Attacker(client, name, prefix, refused=refused)
    finally:
        with contextlib.suppress(Exception):
            await client.close()
