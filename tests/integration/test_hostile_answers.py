"""A scheduler, a scaler and a log that lie with every text they have: commands print them as plain text, over a real
nats-server."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from nats.aio.client import Client
from nats.aio.msg import Msg

from pointsman.contracts.access import ApiKey
from pointsman.contracts.codec import encode
from pointsman.contracts.commands import (
    Command,
    DrainAnswered,
    FleetDescribed,
    InstanceDescribed,
    ScaleAnswered,
    TenantDescribed,
    TenantsDescribed,
)
from pointsman.contracts.permissions import ACCESS_BUCKET
from pointsman.contracts.subjects import stream_name
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import Epoch, InstanceId, PoolName, Tenant, Term
from pointsman_cli.main import main
from tests.support.hostile import HOSTILE, MARKUP, assert_harmless, hostile_log
from tests.support.nats import running_nats
from tests.support.recorded_log import RecordedFleet

SHORT = f"\x1b[2J{MARKUP}\n\u202e"
INSTANCE = InstanceDescribed(
    instance=InstanceId(SHORT), url="http://[fd00::5]:8000", epoch=Epoch(1), status="unschedulable", knowledge=HOSTILE,
    doubt=HOSTILE, pending=0, in_prefill=0, decoding=0, cached_blocks=0, knowledge_reason=HOSTILE, knowledge_since=1.0,
)  # fmt: skip
ANSWERS: dict[str, Command] = {
    "fleet": FleetDescribed(
        pool=HOSTILE, policy=HOSTILE, admission=HOSTILE, ordering=HOSTILE, speed=1.0, scheduler=HOSTILE, term=Term(1),
        as_of=1, instances=[INSTANCE],
    ),
    "drain": DrainAnswered(instance=InstanceId(SHORT), draining=True, requests=3),
    "scale": ScaleAnswered(
        number=1, wanted=1, ready=1, coming=1, leaving=1, applied=False, policy=HOSTILE, provider=HOSTILE, lowest=1,
        highest=2, reason=HOSTILE, trouble=HOSTILE, drained=[InstanceId(SHORT)],
    ),
    "tenants": TenantsDescribed(
        pool=HOSTILE,
        policies=TenantPolicies(tenants={Tenant(HOSTILE): TenantPolicy(cache_group=HOSTILE)}),
        tenants=[TenantDescribed(tenant=Tenant(HOSTILE))],
    ),
}  # fmt: skip
REFUSALS: dict[str, Command] = {
    "drain": DrainAnswered(instance=InstanceId("e"), draining=False, requests=0, refusal=HOSTILE),
    "scale": msgspec.structs.replace(ANSWERS["scale"], refusal=HOSTILE),
}
COMMANDS: dict[str, list[str]] = {
    "fleet": [], "drain": ["engine-1"], "scale": [], "tenants": ["show"], "keys": ["list"], "tap": ["--since", "1", "--until", "now"],
    "replay": [], "state": [], "doctor": [], "usage": [], "hit-rate": [],
}  # fmt: skip


class Liar:
    """Answers every command; `refusing`: with refusals."""

    def __init__(self, client: Client) -> None:
        self.refusing = False
        self._client = client

    async def answer(self, message: Msg) -> None:
        kind = message.subject.split(".")[3]
        if kind == "fleet" and b"DescribeTenants" in message.data:
            kind = "tenants"
        answer = (REFUSALS if self.refusing else ANSWERS).get(kind, ANSWERS["fleet"])
        await self._client.publish(message.reply, encode(answer))  # type: ignore[arg-type]


@pytest.fixture
async def lying(tmp_path: Path) -> AsyncIterator[tuple[str, Liar]]:
    log = RecordedFleet(policy_set(prefill_window_tokens=900), seed=5).live(80).write_all().entries
    async with running_nats(tmp_path) as url:
        client = Client()
        await client.connect(url)
        stream = client.jetstream()
        kinds = [f"pm.default.{kind}" for kind in ("kv.*", "fleet.*", "request.*", "leader", "scale", "lost", "access")]
        await stream.add_stream(name=stream_name(PoolName("default")), subjects=kinds, allow_direct=True)
        for entry in hostile_log(log, policies_too=True):
            await stream.publish(entry.subject, entry.payload)
        access = await stream.create_key_value(bucket=ACCESS_BUCKET)
        key = ApiKey(
            id="a1", digest=bytes(32), tenant=Tenant(HOSTILE), created_at=1.0, created_by=HOSTILE, models=[HOSTILE]
        )
        await access.put("key.a1", msgspec.json.encode(key))
        await access.put("key.b2", msgspec.json.encode({"id": HOSTILE}))
        liar = Liar(client)
        await client.subscribe("pm.default.cmd.>", cb=liar.answer)
        await client.flush()
        yield url, liar
        await client.close()


async def run(url: str, command: str, *arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, [command, *arguments, "--from", url])


async def test_what_a_fleet_answers_is_printed_as_plain_text(lying: tuple[str, Liar]) -> None:
    url, liar = lying
    for command, arguments in COMMANDS.items():
        for switch in ([], ["--json"]):
            ran = await run(url, command, *arguments, *switch)

            assert ran.exception is None or isinstance(ran.exception, SystemExit), (command, ran.exception)
            assert ran.exit_code in (0, 1), (command, ran.output[-1000:])
            assert_harmless(ran.output)
            if switch and command != "tap":
                json.loads(ran.stdout)
            if command in ("fleet", "drain", "scale", "tap"):
                assert MARKUP in ran.stdout, command
            if command == "fleet" and switch:
                assert "http://[fd00::5]:8000" in ran.stdout
    liar.refusing = True
    for command, arguments in (("drain", ["engine-1"]), ("scale", ["3"])):
        refused = await run(url, command, *arguments)

        assert refused.exit_code == 1
        assert MARKUP in refused.output
        assert_harmless(refused.output)
