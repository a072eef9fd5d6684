"""Whoever stops a process gives it the time that its code takes at most. Else it is killed while it saves or drains. The hook
of an engine's pod ends when the engine is idle, and not before."""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain, repeat
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import pytest
from typing_extensions import override

from pointsman.adapters.tcp_ports import free_ports
from pointsman.runtime.supervision import STOP_SECONDS_MAX
from pointsman_ingress.settings import IngressSettings
from pointsman_worker.main import STOP_SECONDS_MAX as WORKER_STOP_SECONDS_MAX
from tests.support.compose import compose_services
from tests.support.deploy_scripts import deploy_script
from tests.support.manifests import all_pods, console_pod
from tests.support.systemd import units

INGRESS = IngressSettings()
LONGER = {
    "pointsman-ingress": INGRESS.lame_duck_seconds + INGRESS.drain_seconds_max + STOP_SECONDS_MAX,
    "pointsman-worker": WORKER_STOP_SECONDS_MAX,
}
MARGIN_SECONDS = 2
"""Until the signal is there, and the process has ended."""


def granted() -> Iterator[tuple[str, str, int]]:
    """Where, the program, and the seconds that it gets."""
    for unit in units():
        yield f"systemd/{unit.name}", unit.command[0].rpartition("/")[2], int(unit.settings["TimeoutStopSec"][-1])
    for name, service in compose_services().items():
        if "stop_grace_period" in service:
            yield f"compose/{name}", service["command"][0], int(service["stop_grace_period"].removesuffix("s"))
    for pod in (*all_pods(), console_pod()):
        if "terminationGracePeriodSeconds" in pod.spec:
            yield str(pod), pod.command[0], pod.spec["terminationGracePeriodSeconds"]


def test_no_process_of_any_deployment_is_killed_before_it_gives_up() -> None:
    ours = [(where, program, seconds) for where, program, seconds in granted() if program.startswith("pointsman")]
    judged = {where for where, _, _ in ours}

    assert [
        (where, seconds)
        for where, program, seconds in ours
        if seconds < LONGER.get(program, STOP_SECONDS_MAX) + MARGIN_SECONDS
    ] == []
    for process in ("scheduler", "ingress", "worker", "rebalancer", "scaler", "recorder", "console"):
        where = {f"systemd/pointsman-{process}", f"compose/{process}", f"single/pointsman-{process}"}
        assert where <= judged


def test_no_program_of_our_image_is_process_1_of_a_pod_or_container() -> None:
    """Process 1 ignores SIGTERM until it has a handler, so a pod that is stopped while Python loads takes its whole grace
    period, of an ingress 620 s."""
    ours = [pod for pod in (*all_pods(), console_pod()) if pod.container["image"].startswith("pointsman:")]
    services = [service for service in compose_services().values() if service.get("image", "").startswith("pointsman:")]

    assert {pod.name for pod in ours} >= {
        "pointsman-ingress",
        "pointsman-nats",
        "pointsman-console",
        "pointsman-engine",
    }
    assert [str(pod) for pod in ours if pod.spec.get("shareProcessNamespace") is not True] == []
    assert services
    assert [service for service in services if service.get("init") is not True] == []


BUSY, IDLE = ('vllm:num_requests_running{engine="0"} 1.0\n', 'vllm:num_requests_running{engine="0"} 0.0\n')
SLOW = TimeoutError("timed out")
REFUSED = URLError(ConnectionRefusedError(111, "Connection refused"))
OVERLOADED = HTTPError("http://engine", 503, "overloaded", {}, None)  # type: ignore[arg-type]
LOOKS_MAX = 1_000


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[float, str]]:
    """What the hook does with an engine whose /metrics answers like this, the last answer for ever: the seconds until it ends,
    and its error, if any."""
    script = deploy_script("kubernetes/base/wait_idle.py")

    def run(*answers: str | Exception) -> tuple[float, str]:
        now = 0.0
        coming = chain(answers, repeat(answers[-1], LOOKS_MAX))

        def look(_url: str, timeout: float) -> io.BytesIO:
            nonlocal now
            answer = next(coming)
            now += timeout if answer is SLOW else 0.01
            if isinstance(answer, Exception):
                raise answer
            return io.BytesIO(answer.encode())

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        monkeypatch.setattr(script, "DIRECT", SimpleNamespace(open=look))
        monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        monkeypatch.setattr(sys, "argv", ["wait_idle.py", "http://127.0.0.1:8000/metrics"])
        try:
            script.main()
        except SystemExit as ended:
            return now, str(ended.code)
        return now, ""

    return run


@pytest.mark.parametrize("trouble", [SLOW, URLError(SLOW), OVERLOADED, ConnectionResetError()], ids=repr)
def test_an_engine_that_answers_late_or_badly_keeps_its_streams(
    waited: Callable[..., tuple[float, str]], trouble: Exception
) -> None:
    seconds, error = waited(BUSY, trouble, BUSY, IDLE, trouble, IDLE)

    assert error == ""
    assert seconds > 7.0, "five looks, and 5 s after the last trouble"


def test_the_hook_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a proxy for downloads cuts the streams: it says that nothing listens at 127.0.0.1."""
    (closed,) = free_ports(1)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed}")
    script = deploy_script("kubernetes/base/wait_idle.py")
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        server.timeout = 5.0
        threading.Thread(target=server.handle_request).start()

        assert script.requests_in(f"http://127.0.0.1:{server.server_port}/metrics") == 1.0


class Busy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(BUSY.encode())

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_the_hook_of_an_engine_that_is_gone_ends_at_once(waited: Callable[..., tuple[float, str]]) -> None:
    seconds, error = waited(BUSY, REFUSED)

    assert seconds < 2.0
    assert "Connection refused" in error


def test_the_hook_of_an_engine_that_is_silent_ends_within_a_minute_or_so(
    waited: Callable[..., tuple[float, str]],
) -> None:
    seconds, error = waited(BUSY, SLOW)

    assert 60.0 < seconds < 75.0
    assert "timed out" in error
