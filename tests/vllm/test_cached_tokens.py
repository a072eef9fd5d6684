"""Cached tokens, predicted against reported: on real engines the two are the same for at least 99% of the requests of a
quiet run; also where blocks are evicted, after the engine was started again, after its cache was reset, where keys stand
for more tokens than engine blocks, and for each data-parallel rank by itself.

Every request goes through the whole of Pointsman. What was predicted and what the engine reported is read from the log.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from typing_extensions import override

from pointsman.adapters.child_process import die_with_parent
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.cache import BlocksRemoved, CacheCleared
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined, InstanceProbed
from pointsman.contracts.requests import RequestFinished
from pointsman.ports import Link
from pointsman.primitives import Sequence, Tokens
from pointsman_cli.discovery import find_fleet
from pointsman_cli.vllm_cpu.home import EngineHome
from pointsman_ingress.lifecycle import EQUAL, FEWER, MORE, compared
from tests.support.log_reading import events_in, link_to
from tests.support.up import pointsman_up
from tests.support.vllm import BLOCK_TOKENS, DEVELOPER_MODE, RealFleet, fetched

MODEL = "smollm2-135m"
AGREEING_MIN = 0.99
PATIENT = {"x-slo-ttft-ms": "600000"}
BOOT_SECONDS_MAX = 400.0
STOP_SECONDS_MAX = 20.0
READY_SECONDS_MAX = 120.0
SETTLE_SECONDS = 0.3
"""Between two requests: time for the engine's events to be folded. That is what makes a run quiet."""

STREAMING: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]

WORDS = [
    "lamp",
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "bridge",
    "music",
    "winter",
    "candle",
    "forest",
    "harbour",
]


@dataclass
class Engine:
    """A real engine on ports of its own, which can be started again in the same place."""

    home: EngineHome
    directory: Path
    flags: tuple[str, ...]
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    kv_ports: list[int] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        # A rank's ports follow those of the first: far enough apart from each other and from what others take.
        self.kv_ports = [self.ports[1], self.ports[1] + 16]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def address(self, rank: int | None = None) -> str:
        """As `pointsman up --engine` takes it."""
        kv, replay = self.kv_ports
        return f"{self.url}#kv={kv}&replay={replay}" + ("" if rank is None else f"&rank={rank}")

    def start(self) -> None:
        """And wait until it answers."""
        kv, replay = (f"tcp://*:{port}" for port in self.kv_ports)
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kv, "replay_endpoint": replay}
        told = [
            "--port",
            str(self.ports[0]),
            "--block-size",
            str(BLOCK_TOKENS),
            "--kv-events-config",
            json.dumps(events),
        ]
        with (self.directory / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.home.serve_command([*told, *self.flags], served_model=MODEL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | DEVELOPER_MODE,
                process_group=0,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        deadline = time.monotonic() + BOOT_SECONDS_MAX
        while True:
            try:
                fetched(f"{self.url}/health")
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, self.last_words
                assert time.monotonic() < deadline, self.last_words
                time.sleep(0.5)
            else:
                return

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def last_words(self) -> str:
        return "\n".join((self.directory / "engine.log").read_text(errors="replace").splitlines()[-30:])


@contextmanager
def engine_with(home: EngineHome, directory: Path, *flags: str) -> Iterator[Engine]:
    engine = Engine(home, directory, flags)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


async def until_probed(link: Link, start: Sequence, instances: int) -> None:
    """Wait until so many instances have joined after `start` and were found to agree."""
    deadline = time.monotonic() + READY_SECONDS_MAX
    while True:
        events = await events_in(link.log, start + 1)
        agreed = {event.instance for event in events if isinstance(event, InstanceProbed) and event.parity}
        if len(agreed) >= instances:
            return
        assert time.monotonic() < deadline, [e for e in events if isinstance(e, InstanceJoined | InstanceProbed)]
        await asyncio.sleep(0.2)


class SessionAffinity:
    """Several chats and documents that grow, one request at a time: whole and streamed, with and without usage."""

    def __init__(self, url: str, seed: int, *, conversations: int = 5) -> None:
        self._url = url
        self._chance = Random(seed)
        self._chats = [
            [{"role": "system", "content": f"Number {seed}-{n}. {self._text(60)}"}] for n in range(conversations)
        ]
        self._documents = [[self._chance.randrange(100, 2000) for _ in range(90)] for _ in range(conversations)]

    async def send(self, requests: int) -> None:
        async with aiohttp.ClientSession() as session:
            for number in range(requests):
                path, body = self._chat() if number % 3 else self._completion()
                body = {"model": MODEL, **body, **STREAMING[number % 3]}
                async with session.post(self._url + path, json=body, headers=PATIENT) as answer:
                    content = await answer.text()
                assert answer.status == 200, content
                await asyncio.sleep(SETTLE_SECONDS)

    def _chat(self) -> tuple[str, dict[str, Any]]:
        place = self._chance.randrange(len(self._chats))
        messages = self._chats[place]
        if len(messages) > 5:
            messages = self._chats[place] = messages[:1]
        messages += [{"role": "user", "content": self._text(self._chance.randrange(3, 40))}]
        body = {"messages": list(messages), "max_tokens": self._chance.randrange(1, 12)}
        messages += [{"role": "assistant", "content": self._text(8)}]
        return "/v1/chat/completions", body

    def _completion(self) -> tuple[str, dict[str, Any]]:
        tokens = self._chance.choice(self._documents)
        tokens += [self._chance.randrange(100, 2000) for _ in range(self._chance.randrange(1, 50))]
        del tokens[400:]
        salt = {"cache_salt": "tenant"} if self._chance.random() < 0.3 else {}
        return "/v1/completions", {"prompt": tokens, "max_tokens": self._chance.randrange(1, 12), **salt}

    def _text(self, words: int) -> str:
        return " ".join(self._chance.choices(WORDS, k=words))


@dataclass(frozen=True)
class Outcome:
    """How a run's predictions turned out."""

    name: str
    outcomes: Counter[str]
    cached: Tokens
    prompt: Tokens

    @property
    def share(self) -> float:
        return self.outcomes[EQUAL] / max(1, self.outcomes.total())

    @override
    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.items())
        return f"{self.name}: {counts} of {self.outcomes.total()} ({self.share:.1%} agree), hit rate {self.cached / self.prompt:.0%}"


def outcome_of(name: str, events: list[LogEvent], *, granularity: Tokens = BLOCK_TOKENS) -> Outcome:
    ends = [event for event in events if isinstance(event, RequestFinished)]
    outcomes = Counter(compared(e.predicted_cached_tokens, e.cached_tokens, granularity=granularity) for e in ends)
    found = Outcome(name, outcomes, sum(e.cached_tokens for e in ends), sum(e.prompt_tokens for e in ends))
    print(f"\n{found}")
    return found


async def run(
    link: Link, traffic: SessionAffinity, requests: int, name: str, *, granularity: Tokens = BLOCK_TOKENS
) -> list[LogEvent]:
    """Send requests and hold the predictions against what was reported."""
    start = (await link.log.extent()).last
    await traffic.send(requests)
    events = await events_in(link.log, start + 1)
    found = outcome_of(name, events, granularity=granularity)
    assert found.outcomes.total() == requests
    assert found.share >= AGREEING_MIN, [e for e in events if isinstance(e, RequestFinished)]
    assert found.cached > 0
    return events


async def nudge(url: str, **headers: str) -> None:
    """An idle engine tells of what happened to its cache at its next step: give it one."""
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": [100, 101], "max_tokens": 1}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
    await asyncio.sleep(1.0)


async def test_in_a_quiet_run_on_two_engines_predictions_are_what_engines_report(real_fleet: RealFleet) -> None:
    async with link_to(real_fleet.file) as link:
        traffic = SessionAffinity(real_fleet.url, 1)
        await run(link, traffic, 100, "quiet run")

    page = fetched(f"{real_fleet.file.of_role('ingress')[0].probes}/metrics").decode()
    lines = [line for line in page.splitlines() if line.startswith("pointsman_cache_predictions_total{")]
    wrong = [line for line in lines if f'"{FEWER}"' in line or f'"{MORE}"' in line]
    assert sum(float(line.rpartition(" ")[2]) for line in wrong) <= 0.01 * 100
    assert sum(float(line.rpartition(" ")[2]) for line in lines) >= 100


async def test_under_eviction_after_a_reset_and_after_a_restart_predictions_are_what_the_engine_reports(
    vllm_home: EngineHome, tmp_path: Path
) -> None:
    small_cache = ("--num-gpu-blocks-override", "48", "--max-model-len", "1024")
    with engine_with(vllm_home, tmp_path, *small_cache) as engine:
        told = ("--engine", engine.address(), "--block-tokens", str(BLOCK_TOKENS))
        with pointsman_up(tmp_path, *told) as up:
            up.wait_for("Try it", READY_SECONDS_MAX)
            fleet = find_fleet(data=up.data)
            async with link_to(fleet) as link:
                await until_probed(link, 0, 1)
                traffic = SessionAffinity(fleet.ingress, 2)
                events = await run(link, traffic, 50, "under eviction")
                assert any(isinstance(event, BlocksRemoved) for event in events)

                start = (await link.log.extent()).last
                fetched(f"{engine.url}/reset_prefix_cache", b"")
                await nudge(engine.url)
                assert any(isinstance(event, CacheCleared) for event in await events_in(link.log, start + 1))
                await run(link, traffic, 25, "after reset_prefix_cache")

                start = (await link.log.extent()).last
                engine.stop()
                engine.start()
                await until_probed(link, start, 1)
                await run(link, traffic, 25, "after a restart of the engine")
            up.stop()


async def test_each_data_parallel_rank_has_predictions_of_its_own(vllm_home: EngineHome, tmp_path: Path) -> None:
    """With keys of two engine blocks each, too."""
    ranks = ("--data-parallel-size", "2", "--api-server-count", "1", "--max-model-len", "1024")
    with engine_with(vllm_home, tmp_path, *ranks) as engine:
        addresses = ",".join(engine.address(rank) for rank in (0, 1))
        granularity = 2 * BLOCK_TOKENS
        told = ("--engine", addresses, "--block-tokens", str(granularity), "--policy", "round_robin")
        with pointsman_up(tmp_path, *told) as up:
            up.wait_for("Try it", READY_SECONDS_MAX)
            fleet = find_fleet(data=up.data)
            async with link_to(fleet) as link:
                await until_probed(link, 0, 2)
                events = await run(link, SessionAffinity(fleet.ingress, 3), 60, "two ranks", granularity=granularity)
            up.stop()
        used = answer_counts(fetched(f"{engine.url}/metrics").decode())

    ends = [event for event in events if isinstance(event, RequestFinished)]
    assert set(Counter(event.instance for event in ends).values()) == {30}
    assert all(count >= 30 for count in used.values()), used
    assert set(used) == {"0", "1"}


def answer_counts(metrics: str) -> dict[str, float]:
    """Requests that each rank of an engine has finished."""
    counts: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("vllm:request_success_total{"):
            rank = line.partition('engine="')[2].partition('"')[0]
            counts[rank] = counts.get(rank, 0.0) + float(line.rpartition(" ")[2])
    return counts
