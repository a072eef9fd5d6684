"""The fleet that `pointsman up` starts, and its console: what both show, who comes back, and that nothing stays behind."""

import asyncio
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import aiohttp
import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import free_ports
from pointsman.adapters.tokenizer.tokenizer import BUILTIN_DIRECTORY
from pointsman.contracts.commands import DescribeFleet, DrainInstance
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import admin_subject, command_subject
from pointsman.ports import ForbiddenError
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.discovery import find_fleet
from pointsman_cli.up.runner import STOP_SECONDS_MAX
from tests.integration.test_up import gone, simulated_engine, up_fails
from tests.support.up import OUTSIDER, POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("hang_ups_end_processes")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    told = ("--instances", "1", "--speed", "50", "--console", "--console-port", "0")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *told) as up:
        up.wait_for("Stop +Ctrl-C")
        yield up


def test_a_second_fleet_with_the_same_data_directory_is_refused(fleet: RunningUp, tmp_path: Path) -> None:
    assert f"the data directory {fleet.data} is in use by the fleet that pid {fleet.process.pid} runs" in up_fails(
        tmp_path, "--data", str(fleet.data)
    )


def test_the_curl_line_that_it_prints_streams_an_answer(fleet: RunningUp) -> None:
    line = fleet.wait_for(r"curl -N .*")[0]

    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30, check=False)

    assert answer.stdout.startswith("data: "), answer
    assert answer.stdout.rstrip().endswith("data: [DONE]")


def test_fleet_shows_the_instance_that_up_started(fleet: RunningUp) -> None:
    command = [POINTSMAN, "fleet", "--json", "--from", str(fleet.data)]

    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    (instance,) = json.loads(answer.stdout)["instances"]
    assert (instance["instance"], instance["status"]) == ("engine-1", "ready")
    assert instance["url"] == find_fleet(data=fleet.data).of_role("engine")[0].url
    assert {"epoch", "knowledge", "pending", "in_prefill", "decoding", "cached_blocks"} <= set(instance)
    assert re.fullmatch("[0-9a-f]{16}", instance["digest"])
    assert instance["prediction_error"] is None or instance["prediction_error"] >= 0


def test_a_tap_since_a_time_before_the_log_began_shows_all_of_it(fleet: RunningUp) -> None:
    earlier = (datetime.now().astimezone() - timedelta(hours=1)).strftime("%H:%M:%S")
    command = [POINTSMAN, "tap", "--from", str(fleet.data), "--since", earlier, "--until", "now", "--json"]

    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert [json.loads(line)["sequence"] for line in told.stdout.splitlines()][:3] == [1, 2, 3], told


def test_the_secret_and_the_fleet_file_are_where_they_belong(fleet: RunningUp) -> None:
    secret = fleet.data / "secret"

    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in fleet.output
    assert find_fleet(data=fleet.data).pid == fleet.process.pid


# Its console


@pytest.fixture(scope="module")
def url(fleet: RunningUp) -> str:
    return fleet.wait_for(r"Console +(http://\S+)")[1]


@pytest.fixture(scope="module")
def asked(fleet: RunningUp) -> str:
    """The id of a request that was answered."""
    body = {"model": "pointsman-sim", "max_tokens": 4, "messages": [{"role": "user", "content": "a question " * 100}]}
    request = Request(
        f"{fleet.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=20) as answer:
        return str(answer.headers["x-pointsman-request-id"])


def api(url: str, path: str, body: dict[str, Any] | None = None, token: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url + path, data, headers), timeout=20) as answer:
        return json.load(answer)


async def until(read: Callable[[], Any], done: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(30):
        while not done(found := await asyncio.to_thread(read)):  # noqa: ASYNC110 - the page is asked, as people do
            await asyncio.sleep(0.2)
    return found


async def test_the_console_follows_the_log_of_the_fleet(url: str, asked: str) -> None:
    await until(lambda: api(url, "/api/requests"), lambda view: asked in [one["request"] for one in view["requests"]])
    status = api(url, "/api/status")

    assert status["health"] == "live"
    assert status["can_act"]
    assert {one["status"] for one in api(url, "/api/fleet")["instances"]} == {"ready"}


async def test_the_metrics_of_the_console_tell_its_version_and_every_step_that_may_fail(url: str) -> None:
    page = await asyncio.to_thread(lambda: urlopen(f"{url}/metrics", timeout=20).read().decode())

    assert 'pointsman_build_info{version="' in page
    assert 'pointsman_unexpected_errors_total{step="console_page"} 0.0' in page


async def test_one_requests_timeline_is_worked_out_from_the_live_log(url: str, asked: str) -> None:
    told = await until(lambda: api(url, f"/api/requests/{asked}"), lambda view: view["state"] in ("done", "failed"))

    assert told["state"] == "done", told["problem"]
    assert told["timeline"]["request"] == asked
    assert told["timeline"]["phases"]


async def test_who_shows_the_token_drains_an_engine_and_takes_it_back(fleet: RunningUp, url: str) -> None:
    token = (fleet.data / "console-token").read_text().strip()

    done = await asyncio.to_thread(api, url, "/api/instances/engine-1/drain", {}, token)
    assert done["done"], done
    drained = await until(
        lambda: api(url, "/api/fleet")["instances"],
        lambda instances: any(one["status"] == "draining" for one in instances),
    )
    assert [one["instance"] for one in drained if one["status"] == "draining"] == ["engine-1"]

    undone = await asyncio.to_thread(api, url, "/api/instances/engine-1/undrain", {}, token)
    assert undone["done"], undone
    history = await until(
        lambda: api(url, "/api/history")["events"], lambda events: any(e["kind"] == "undrained" for e in events)
    )
    assert "by local" in next(event["detail"] for event in history if event["kind"] == "undrained")


async def test_the_consoles_user_on_the_bus_can_ask_nothing_of_a_leader(fleet: RunningUp) -> None:
    """`pointsman_up` checks at its end that no user was refused anything: the console never tries."""
    user = BusUser(BusRole.CONSOLE)
    listed = json.loads((fleet.data / "fleet.json").read_text())
    seed = Credentials(Path(listed["credentials"])).file(user)
    settings = FleetSettings(nats=listed["nats"], nats_credentials=str(seed))
    async with open_link(settings, ScaledClock(), HealthBoard(), name=OUTSIDER, user=user) as link:
        async with asyncio.timeout(10):
            while not link.commands.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        pool = PoolName("default")
        for subject, command in (
            (command_subject(pool, "fleet"), DescribeFleet()),
            (admin_subject(pool, "drain", "local"), DrainInstance(instance=InstanceId("engine-1"), reason="no")),
        ):
            with pytest.raises(ForbiddenError):
                await link.commands.request(subject, command, timeout=WallSeconds(2.0))


async def test_a_page_of_the_console_changes_nothing_without_its_form_token(fleet: RunningUp, url: str) -> None:
    token = (fleet.data / "console-token").read_text().strip()
    form = urlencode({"token": token}).encode()

    def sign_in() -> int:
        try:
            with urlopen(Request(f"{url}/sign-in", form), timeout=10) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))

    assert await asyncio.to_thread(sign_in) == 401


# Who is stopped or dies


async def test_an_ingress_that_is_told_to_stop_finishes_its_streams_and_comes_back(fleet: RunningUp) -> None:
    (ingress,) = find_fleet(data=fleet.data).of_role("ingress")
    body = {"model": "pointsman-sim", "prompt": "once upon a time", "max_tokens": 4_000, "stream": True}
    async with aiohttp.ClientSession() as session:

        async def is_whole() -> bool:
            async with session.get(f"{ingress.probes}/readyz") as probe:
                return bool((await probe.json())["degraded"] == {})

        await eventually(is_whole)
        streams = [await session.post(f"{fleet.url}/v1/completions", json=body) for _ in range(4)]
        begun = [await stream.content.readuntil(b"\n\n") for stream in streams]
        os.kill(ingress.pid, signal.SIGTERM)

        async def plays_lame_duck() -> bool:
            async with session.get(f"{ingress.probes}/readyz") as probe:
                return probe.status == 503

        await eventually(plays_lame_duck)
        rests = [await stream.content.read() for stream in streams]

    assert [first[:5] for first in begun] == [b"data:"] * 4, begun
    assert [rest.rstrip().endswith(b"data: [DONE]") for rest in rests] == [True] * 4
    fleet.wait_for(rf"ingress \(pid {ingress.pid}\) ended in order, with exit code 0")
    fleet.wait_for("ingress was started again as pid")


def test_a_worker_that_is_told_to_stop_comes_back_in_the_same_epoch(fleet: RunningUp) -> None:
    (worker,) = find_fleet(data=fleet.data).of_role("worker")
    log = fleet.data / "logs" / "worker-1.log"
    os.kill(worker.pid, signal.SIGTERM)

    fleet.wait_for("worker-1 was started again as pid")
    deadline = time.monotonic() + 60
    while "epoch_resumed" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    handed_over = re.search(r"handover_written.*epoch=(\d+)", log.read_text())
    goes_on = re.search(r"epoch_resumed.*epoch=(\d+)", log.read_text())
    assert handed_over is not None
    assert goes_on is not None
    assert handed_over[1] == goes_on[1]


def test_an_engine_that_dies_is_reported_and_comes_back_under_a_new_pid(fleet: RunningUp) -> None:
    dead = find_fleet(data=fleet.data).of_role("engine")[0].pid

    os.kill(dead, signal.SIGKILL)

    fleet.wait_for(
        rf"engine-1 \(pid {dead}\) was killed by SIGKILL; its log is {re.escape(str(fleet.data))}/logs/engine-1.log"
    )
    fleet.wait_for("engine-1 was started again as pid")
    assert find_fleet(data=fleet.data).of_role("engine")[0].pid != dead


def test_an_interrupt_stops_everything_and_kills_nothing(fleet: RunningUp) -> None:
    pids = [process.pid for process in find_fleet(data=fleet.data).processes]

    fleet.stop()

    assert fleet.process.returncode == 0, fleet.output
    assert "killed, for not stopping" not in fleet.output
    assert gone(pids)


@pytest.mark.parametrize(("second", "kills"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_only_a_second_ctrl_c_kills_and_leaves_nobody_behind_either(
    tmp_path: Path, second: signal.Signals, kills: bool
) -> None:
    with pointsman_up(tmp_path, "--instances", "1..1", "--speed", "50") as up:
        up.wait_for("Stop +Ctrl-C")
        pids = [process.pid for process in find_fleet(data=up.data).processes] + scaled_instance(up.data)

        up.process.send_signal(signal.SIGHUP)
        up.wait_for("stopping")
        up.stop(second)

        assert up.process.returncode == 0, up.output
        assert gone(pids)
        assert kills or "killing" not in up.output


def test_a_fleet_that_was_started_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with pointsman_up(tmp_path, "--instances", "1") as up:
            up.wait_for("starting the fleet")
            status = Path(f"/proc/{up.process.pid}/status").read_text()
            up.stop(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)

    ignored = re.search(r"SigIgn:\s*([0-9a-f]+)", status)
    assert ignored is not None
    assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1


def test_a_reader_who_goes_away_keeps_nobody_from_stopping_in_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [POINTSMAN, "up", "--data", str(data), "--port", "0", "--no-console", "--instances", "1", "--speed", "50"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as up:
        try:
            assert up.stdout is not None
            assert any(b"Ctrl-C" in line for line in up.stdout)
            pids = [process.pid for process in find_fleet(data=data).processes]
            up.stdout.close()

            up.send_signal(signal.SIGHUP)

            assert up.wait(STOP_SECONDS_MAX) == 0
            assert gone(pids)
        finally:
            up.kill()


def test_nothing_survives_an_up_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    with pointsman_up(tmp_path, "--instances", "1") as up:
        up.wait_for("starting the fleet")
        pids = wait_for_children(up.process.pid)

        up.process.kill()
        up.process.wait()

        assert gone(pids)


def test_nothing_survives_a_killed_up_not_even_what_its_scaler_started(tmp_path: Path) -> None:
    with pointsman_up(tmp_path, "--instances", "1..1", "--speed", "50") as up:
        up.wait_for("Stop +Ctrl-C")
        pids = [process.pid for process in find_fleet(data=up.data).processes] + scaled_instance(up.data)

        up.process.kill()
        up.process.wait()

        assert gone(pids)


def test_of_engines_that_run_already_it_is_told_how_well_their_caches_are_known(tmp_path: Path) -> None:
    seen, unseen, kv, replay = free_ports(4)
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{kv}", "replay_endpoint": f"tcp://*:{replay}"}
    publishing = simulated_engine(seen, "--kv-events-config", json.dumps(events))
    with publishing, simulated_engine(unseen), engine_of_vectors() as vectors:
        urls = f"http://127.0.0.1:{seen}#kv={kv}&replay={replay},http://127.0.0.1:{unseen}"
        also = ("--also", f"vectors={vectors}#kv={kv}")
        told = ("--engine", urls, *also, "--speed", "2", "--tokenizer", str(BUILTIN_DIRECTORY))
        with pointsman_up(tmp_path, *told) as up:
            up.wait_for(rf"✓ engine-1 \(http://127.0.0.1:{seen}\): the keys of a chat agree")
            up.wait_for(rf"✗ engine-2 \(http://127.0.0.1:{unseen}\) is blind: no endpoint of KV events was named")
            up.wait_for(rf"✓ vectors-engine-1 \({vectors}\) makes vectors: it is placed by load")
            assert "probe_failed" not in (up.data / "logs" / "ingress.log").read_text()


@contextmanager
def engine_of_vectors() -> Iterator[str]:
    """The URL of an engine as vLLM's with `--runner pooling`, as far as a worker asks."""
    pages = {
        "/health": b"",
        "/v1/models": b'{"data":[{"id":"vectors","max_model_len":512,"parent":null}]}',
        "/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0\n',
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(200 if page is not None else 405 if self.path == "/v1/embeddings" else 404)
            self.end_headers()
            self.wfile.write(page or b"")

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def wait_for_children(pid: int, count: int = 5) -> list[int]:
    """The children of a process once there are so many; of an `up` the nats-server is the first."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    while len(pids := [int(child) for child in listed.read_text().split()]) < count:
        time.sleep(0.02)
    return pids


def scaled_instance(data: Path) -> list[int]:
    """The keeper of the first instance that a scaler starts, its engine and its worker."""
    lock = data / "instances" / "scaled-1.lock"
    while not (lock.exists() and lock.read_text()):
        time.sleep(0.02)
    keeper = int(lock.read_text())
    return [keeper, *wait_for_children(keeper, 2)]
