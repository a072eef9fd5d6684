"""Roles of a split pool follow the load and an operator while clients are served: scheduler, scaler, workers, ingress and
simulated engines in one process, engines and clients over real sockets. No answer is lost or given twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from pointsman.contracts.commands import DrainInstance, UndrainInstance
from pointsman.contracts.decisions import RequestEnd, ScaleDecided
from pointsman.contracts.fleet import InstanceJoined, InstanceRoleChanged
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.ports import Link
from pointsman.primitives import InstanceId
from pointsman.runtime.settings import FleetSettings
from pointsman.simulation.replay import verify
from pointsman_cli import drain
from tests.support.memory_pool import POOL
from tests.support.role_switching import roles, scale, scaler
from tests.support.split_fleet import SplitFleet, simulated_split_fleet
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
ROLES = {"e1": "prefill", "e2": "decode", "e3": "decode", "e4": "decode"}


async def ask(fleet: SplitFleet, name: str, *, prompt: int, output: int) -> int:
    body: dict[str, Any] = {"model": "pointsman-sim", "prompt": [hash(name) % 5000 + n for n in range(prompt)]}
    _, answer = await fleet.ask(COMPLETIONS, name, body | {"max_tokens": output, "ignore_eos": True})
    return int(answer["usage"]["completion_tokens"])


async def asked_in_a_row(fleet: SplitFleet, name: str, until: asyncio.Event, **shape: int) -> dict[str, int]:
    """One client: its next request follows each answer."""
    answers: dict[str, int] = {}
    while not until.is_set():
        request = f"{name}-{len(answers)}"
        answers[request] = await ask(fleet, request, **shape)
    return answers


async def assert_nothing_is_lost(fleet: SplitFleet, answers: dict[str, int], output: set[int]) -> None:
    workload = fleet.scheduler.state.workload
    await eventually(lambda: not workload.requests)
    entries = await fleet.pool.entries()
    ends = [entry.event for entry in entries if isinstance(entry.event, RequestEnd)]
    named = {e.event.request: e.event.client_request_id for e in entries if isinstance(e.event, RequestArrived)}
    verdict = verify(entries)

    assert {type(end) for end in ends} == {RequestFinished}
    assert Counter(named[end.request] for end in ends) == Counter(list(answers))
    assert set(answers.values()) == output
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])


async def test_an_operator_changes_roles_under_load_and_another_scaler_finishes_it() -> None:
    async with simulated_split_fleet(ROLES, role_switching=True) as (fleet, _):
        done = asyncio.Event()
        clients = [asyncio.create_task(asked_in_a_row(fleet, f"c{n}", done, prompt=640, output=40)) for n in range(4)]
        async with scaler(fleet, "s1"):
            began = await scale(fleet, 2, 2)
            too_many = await scale(fleet, 4, 4)
        async with scaler(fleet, "s2"):  # takes over in the middle of it
            await eventually(lambda: roles(fleet) == {"prefill": 2, "decode": 2}, seconds=10.0)
            await scale(fleet, 3, 1)
            await eventually(lambda: roles(fleet) == {"prefill": 3, "decode": 1}, seconds=10.0)
        done.set()
        answers = {name: tokens for client in clients for name, tokens in (await client).items()}
        events = [entry.event for entry in await fleet.pool.entries()]

        assert (began.refusal, began.prefill, began.decode) == ("", 2, 2)
        assert "from 4 to 4" in too_many.refusal
        assert [(d.prefill, d.decode) for d in events if isinstance(d, ScaleDecided)] == [(1, 3), (2, 2), (3, 1)]
        assert len([e for e in events if isinstance(e, InstanceJoined)]) == 4  # no restart, no new epoch
        assert [e.role for e in events if isinstance(e, InstanceRoleChanged)] == ["prefill", "prefill"]
        await assert_nothing_is_lost(fleet, answers, {40})


async def test_roles_follow_a_load_that_turns_from_long_prompts_to_long_answers() -> None:
    wanted = {"prefill": 0.05, "kv": 0.01, "window_s": 20.0}
    async with simulated_split_fleet(ROLES, role_switching=True) as (fleet, _):
        async with scaler(fleet, "s1", "target_utilisation", wanted):
            answers: dict[str, int] = {}
            for name, shape, role in (
                ("long-prompt", {"prompt": 2000, "output": 2}, "prefill"),
                ("long-answer", {"prompt": 64, "output": 150}, "decode"),
            ):
                before = roles(fleet)[role]
                done = asyncio.Event()
                clients = [asyncio.create_task(asked_in_a_row(fleet, f"{name}-{n}", done, **shape)) for n in range(6)]
                with suppress(AssertionError):
                    await eventually(lambda r=role, b=before: roles(fleet)[r] > b, seconds=20.0)  # type: ignore[misc]
                done.set()
                for client in clients:
                    answers |= await client
        changes = [entry.event for entry in await fleet.pool.entries() if isinstance(entry.event, InstanceRoleChanged)]

        assert {event.role for event in changes} == {"prefill", "decode"}
        await assert_nothing_is_lost(fleet, answers, {2, 150})


@pytest.mark.parametrize("kept", [False, True], ids=["changed", "taken-back"])
async def test_a_drain_into_a_role_waits_for_the_role_and_says_which_it_is(
    kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with simulated_split_fleet(ROLES, role_switching=True) as (fleet, _):

        @asynccontextmanager
        async def link(*_: Any, **__: Any) -> AsyncIterator[Link]:
            yield fleet.pool.broker.client(fleet.pool.clock, name="alice")

        monkeypatch.setattr(drain, "connected_link", link)
        done = asyncio.Event()
        clients = [asyncio.create_task(asked_in_a_row(fleet, f"c{n}", done, prompt=64, output=200)) for n in range(6)]
        queues = fleet.scheduler.state.workload.queues
        await eventually(lambda: "e2" in queues and queues[InstanceId("e2")].requests > 0)
        instance, settings = InstanceId("e2"), FleetSettings(pool=POOL)
        command = DrainInstance(instance=instance, reason="test", becomes="prefill")
        waiting = asyncio.create_task(drain._drain(settings, command, wait=True, as_json=False))
        await eventually(lambda: "e2: role decode" in capsys.readouterr().out)
        if kept:
            await drain._drain(settings, UndrainInstance(instance=instance), wait=False, as_json=False)
        async with asyncio.timeout(30.0):
            code = await waiting
        role, said = fleet.scheduler.state.fleet[instance].role, capsys.readouterr()
        done.set()
        await asyncio.gather(*clients)

    if kept:
        assert (code, role) == (1, "decode")
        assert "e2 stays with the role decode" in said.err
    else:
        assert (code, role) == (0, "prefill")
        assert said.out.splitlines()[-1] == "e2 has the role prefill and is back in service"
