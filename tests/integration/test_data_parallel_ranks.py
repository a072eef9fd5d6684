"""An engine with two data-parallel ranks, as vLLM has them: one HTTP address, a cache and KV events of each rank's own.

Two simulated engines behind one front that sends each request to the rank that its header names. Each rank is an
instance with a worker; what is predicted for it must be what it reports.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId
from pointsman_cli.discovery import find_fleet
from pointsman_engine_sim.server import EngineServer
from pointsman_ingress.lifecycle import EQUAL, compared
from tests.support.engine_sim import running_engine
from tests.support.log_reading import events_in, link_to
from tests.support.quiet_run import AGREEING_MIN, MODEL, SPEED, send_conversations, until_held
from tests.support.up import pointsman_up

BLOCK = 32
REQUESTS = 40


@asynccontextmanager
async def front(ranks: list[EngineServer], served: Counter[str]) -> AsyncIterator[str]:
    """One address for all ranks. Requests without a rank go to the first; metrics are those of all, by rank."""

    async def forward(request: web.Request) -> web.StreamResponse:
        named = request.headers.get("x-data-parallel-rank", "")
        if request.path.endswith("completions"):
            served[named] += 1
        url = ranks[int(named or 0)].url + request.path
        async with aiohttp.ClientSession() as session:
            body = await request.read()
            async with session.request(
                request.method, url, data=body, headers={"content-type": "application/json"}
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    headers={"content-type": answer.headers["content-type"]},
                )

    async def metrics(_: web.Request) -> web.Response:
        pages = []
        async with aiohttp.ClientSession() as session:
            for rank, engine in enumerate(ranks):
                async with session.get(f"{engine.url}/metrics") as answer:
                    pages.append((await answer.text()).replace('engine="0"', f'engine="{rank}"'))
        return web.Response(text="".join(pages))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def two_after_each_other() -> tuple[int, int]:
    """Ports of the first rank's events and replays, of which the next ones are free, too."""
    kv = free_ports(1)[0]
    return kv, kv + 2


async def test_each_rank_has_an_index_and_predictions_of_its_own(tmp_path: Path) -> None:
    kv, replay = two_after_each_other()
    served: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            events = {
                "enable_kv_cache_events": True,
                "topic": "kv",
                "endpoint": f"tcp://*:{kv + rank}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay + rank}",
            }
            engine = running_engine(
                speed=SPEED, block_size=BLOCK, max_model_len=4096, kv_events_config=json.dumps(events)
            )
            ranks.append(await stack.enter_async_context(engine))
        url = await stack.enter_async_context(front(ranks, served))
        addresses = ",".join(f"{url}#kv={kv}&replay={replay}&rank={rank}" for rank in (0, 1))
        told = ("--engine", addresses, "--block-tokens", str(BLOCK), "--policy", "round_robin", "--speed", str(SPEED))
        up = stack.enter_context(pointsman_up(tmp_path, *told))
        await asyncio.to_thread(up.wait_for, "Try it")
        fleet = find_fleet(data=up.data)
        settings = fleet.settings()
        link = await stack.enter_async_context(link_to(fleet))

        await send_conversations(fleet.ingress, REQUESTS)

        chain = KeyChain(secret=settings.secret.encode(), model=MODEL, block_tokens=BLOCK)
        named = {InstanceId(f"engine-{rank + 1}"): (engine, BLOCK) for rank, engine in enumerate(ranks)}
        state = await until_held(link, chain, named)
        log = await events_in(link.log)

    ends = [event for event in log if isinstance(event, RequestFinished)]
    outcomes = Counter(compared(e.predicted_cached_tokens, e.cached_tokens, granularity=BLOCK) for e in ends)
    assert outcomes[EQUAL] >= AGREEING_MIN * REQUESTS, outcomes
    ended = Counter[str](end.instance for end in ends)
    assert ended.total() == REQUESTS
    assert ended["engine-1"] <= served["0"], "each request is served by the rank that it was placed on"
    assert ended["engine-2"] <= served["1"], "each request is served by the rank that it was placed on"
    assert min(ended.values()) >= REQUESTS // 2 - 2, "turns are taken; rebalancing may move a few"
    assert [state.fleet[name].dp_rank for name in named] == [0, 1]
    assert set(state.index.keys(InstanceId("engine-1"))) != set(state.index.keys(InstanceId("engine-2")))
