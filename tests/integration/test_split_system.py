"""Prefill and decode on instances of their own, all of the system at work: scheduler, workers, ingress and simulated
engines in one process over the in-memory log, engines and clients over real sockets."""

import asyncio

from pointsman.contracts.decisions import RequestGranted, RequestHandedOver, RequestPlaced
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestFinished
from pointsman.primitives import InstanceId, RequestId
from pointsman.simulation.replay import verify
from tests.support.split_fleet import simulated_split_fleet
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
PROMPT = list(range(1000, 1640))
"""Ten blocks of 64."""

BODY = {"model": "pointsman-sim", "prompt": PROMPT, "max_tokens": 6}
STREAM = BODY | {"stream": True}


async def test_a_prompt_is_prefilled_at_one_engine_and_answered_by_another() -> None:
    async with simulated_split_fleet({"p1": "prefill", "d1": "decode"}) as (fleet, engines):
        headers, answer = await fleet.ask(COMPLETIONS, "first", BODY)
        _, alone = await fleet.ask(COMPLETIONS, "alone", BODY | {"prompt": [*PROMPT[:-1], 7]})
        p1, d1 = engines["p1"].model, engines["d1"].model
        async with fleet.http.post(f"{engines['p1'].url}/v1/completions", json=BODY) as direct:
            expected = await direct.json()

        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert alone["usage"]["completion_tokens"] == 6
        assert headers["x-pointsman-instance"] == "d1"
        assert headers["x-pointsman-prefill-instance"] == "p1"
        assert d1.counts.prompt_tokens == 2 * len(PROMPT)
        assert (p1.cache.blocks_held, d1.cache.blocks_held) == (0, 0)
        kinds = [type(event) for event in await fleet.life_of("first") if not isinstance(event, PrefillFinished)]
        assert kinds == [RequestArrived, RequestPlaced, RequestGranted, RequestHandedOver, RequestFinished]


async def test_blocks_are_known_at_both_engines_and_what_is_there_is_not_fetched_again() -> None:
    async with simulated_split_fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}) as (fleet, _):
        await fleet.ask(COMPLETIONS, "first", STREAM)
        placed = next(event for event in await fleet.life_of("first") if isinstance(event, RequestPlaced))
        index = fleet.scheduler.state.index
        await eventually(lambda: index.blocks(InstanceId("p1")) >= 10 and index.blocks(placed.decode) >= 10)
        await fleet.ask(COMPLETIONS, "second", STREAM)
        again = next(event for event in await fleet.life_of("second") if isinstance(event, RequestPlaced))
        reports = [e.event for e in await fleet.pool.entries() if isinstance(e.event, InstanceReported)]

        assert placed.decode_candidates[0].transfer_tokens == len(PROMPT)
        assert (again.hit_blocks, again.decode) == (10, placed.decode)
        assert {c.instance: c.transfer_tokens for c in again.decode_candidates}[placed.decode] == 64
        assert not any(instance.doubt for instance in fleet.scheduler.state.fleet.instances)
        assert {report.undecodable for report in reports} == {0}


async def test_decisions_on_pairs_are_made_again_from_the_log() -> None:
    async with simulated_split_fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}) as (
        fleet,
        _,
    ):
        prompts = [[*PROMPT[: 64 * (n % 8)], n + 1, *PROMPT] for n in range(24)]
        answers = await asyncio.gather(
            *(
                fleet.ask(COMPLETIONS, f"r{n}", BODY | {"prompt": prompt, "stream": n % 2 == 0})
                for n, prompt in enumerate(prompts)
            )
        )
        served = {(a["x-pointsman-prefill-instance"], a["x-pointsman-instance"]) for a, _ in answers}
        workload = fleet.scheduler.state.workload
        await eventually(lambda: not workload.requests)
        verdict = verify(await fleet.pool.entries())

        assert {instance for pair in served for instance in pair} == {"p1", "p2", "d1", "d2"}
        assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
        assert verdict.identical == verdict.decisions >= 72
        assert not any(line.requests or line.expected for line in workload.queues.values())


async def test_a_decode_engine_that_is_gone_costs_the_client_nothing() -> None:
    async with simulated_split_fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}) as (fleet, engines):
        engine = engines["d1"]
        engine.model.submit = _refuse  # type: ignore[method-assign]
        answers = [await fleet.ask(COMPLETIONS, f"r{n}", STREAM) for n in range(3)]

        assert {headers["x-pointsman-instance"] for headers, _ in answers} == {"d2"}
        placements = [e for e in await fleet.life_of("r0") if isinstance(e, RequestPlaced)]
        assert [p.excluded for p in placements] == [[], ["d1"]]
        assert RequestId("r0") not in fleet.scheduler.state.workload.requests


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("the engine has a defect")
