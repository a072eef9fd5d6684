"""Real engines change their roles without a restart: the load turns to long answers, and the scaler makes a decode instance
of one that prefilled; then an operator changes it back. Its cache stays, and its answers are those of a single engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from pointsman.contracts.decisions import RequestEnd, ScaleDecided
from pointsman.contracts.fleet import InstanceJoined, InstanceRoleChanged
from pointsman.contracts.requests import RequestFinished
from pointsman.simulation.replay import verify
from pointsman_cli.vllm_cpu import machine
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.role_switching import roles, scale, scaler
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually
from tests.vllm.test_split import FETCHED, nixl_engines

COMPLETIONS = "/v1/completions"
ROLES = {"e1": "prefill", "e2": "prefill", "e3": "decode"}
"""As many as it takes for a role to change and none to be empty."""
WANTED = {"prefill": 0.9, "kv": 0.002, "window_s": 20.0}
"""A decode instance with 90 tokens in its KV cache is as busy as wanted."""
CLIENTS, SWITCH_SECONDS_MAX = 3, 120.0
TEXT = (
    "The history of the lighthouse at the mouth of the river begins with a storm. " * 5
    + "The history of the lighthouse"
)


@pytest.fixture(scope="module")
def engines(vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningEngine]]:
    try:
        machine.check_can_run(engines=len(ROLES))
    except machine.UnsuitableMachineError as error:
        pytest.skip(f"not as many real engines here: {error}")
    with nixl_engines(vllm_home, tmp_path_factory.mktemp("roles"), roles=["kv_both"] * len(ROLES)) as booted:
        yield dict(zip(ROLES, booted, strict=True))


@pytest.fixture
async def fleet(engines: dict[str, RunningEngine], vllm_home: EngineHome) -> AsyncIterator[SplitFleet]:
    told = {"role_switching": True, "engine_model": "smollm2-135m-cpu"}
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, told | {"role": ROLES[name]})
        for name, engine in engines.items()
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened


async def test_the_scaler_makes_a_decode_instance_of_one_that_prefilled_and_an_operator_changes_it_back(
    fleet: SplitFleet,
    engines: dict[str, RunningEngine],
    unlike_any_other: str,
    tell_what_was_measured: Callable[[str], None],
) -> None:
    done = asyncio.Event()
    async with scaler(fleet, "s1", "target_utilisation", WANTED):
        clients = [asyncio.create_task(_asked_in_a_row(fleet, f"{unlike_any_other} {n}", done)) for n in range(CLIENTS)]
        await eventually(lambda: roles(fleet) == {"prefill": 1, "decode": 2}, seconds=SWITCH_SECONDS_MAX)
        (changed,) = [
            entry.event for entry in await fleet.pool.entries() if isinstance(entry.event, InstanceRoleChanged)
        ]
        switched = engines[changed.instance]
        held, fetched = fleet.scheduler.state.index.blocks(changed.instance), switched.metric(FETCHED)
        await eventually(lambda: switched.metric(FETCHED) > fetched, seconds=SWITCH_SECONDS_MAX)
        done.set()
        answered = sum([await client for client in clients])
    async with scaler(fleet, "s2"):
        await scale(fleet, 2, 1)
        await eventually(lambda: roles(fleet) == {"prefill": 2, "decode": 1}, seconds=SWITCH_SECONDS_MAX)

    body = _body(f"{unlike_any_other} last")
    headers, answer = await fleet.ask(COMPLETIONS, "last", body)
    alone = await asyncio.to_thread(switched.ask, COMPLETIONS, body)
    entries = await fleet.pool.entries()
    events = [entry.event for entry in entries]
    ends = [event for event in events if isinstance(event, RequestEnd)]
    verdict = verify(entries)
    decided = [event.at for event in events if isinstance(event, ScaleDecided)][1:]
    changes = [event for event in events if isinstance(event, InstanceRoleChanged)]
    waits = [f"{change.at - at:.1f}" for change, at in zip(changes, decided, strict=True)]
    tell_what_was_measured(f"roles changed {' and '.join(waits)} s after the decision; {answered} answers meanwhile")

    assert held > 0, "what it had computed before it changed"
    assert headers["x-pointsman-prefill-instance"] != headers["x-pointsman-instance"]
    assert answer["choices"][0] == alone["choices"][0]
    assert [(e.prefill, e.decode) for e in events if isinstance(e, ScaleDecided)] == [(2, 1), (1, 2), (2, 1)]
    assert [change.role for change in changes] == ["decode", "prefill"]
    assert len([e for e in events if isinstance(e, InstanceJoined)]) == len(ROLES)  # no restart, no new epoch
    assert ({type(end) for end in ends}, len(ends)) == ({RequestFinished}, answered + 1)
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])


async def _asked_in_a_row(fleet: SplitFleet, name: str, until: asyncio.Event) -> int:
    """One client, whose next request follows each answer. Returns how many it had."""
    answers = 0
    while not until.is_set():
        await fleet.ask(COMPLETIONS, f"{name}-{answers}", _body(f"{name} {answers}"))
        answers += 1
    return answers


def _body(name: str) -> dict[str, Any]:
    return {"model": SERVED_MODEL, "prompt": f"{name}. {TEXT}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
