"""The three nats-servers of the overlay `ha` as processes: they find each other by the names that the manifests give, keep a
log of three copies, and one that stops by its hook does so in lame duck and comes back by its probes."""

import json
import re
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.manifests import by_name, rendered
from tests.support.pod_processes import PodProcesses, Running
from tests.support.rbac_api import RbacApi

pytestmark = pytest.mark.timeout(300)

START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 60.0


def test_three_servers_keep_a_log_of_three_copies_stop_in_lame_duck_and_come_back(tmp_path: Path) -> None:
    api = RbacApi(tmp_path, by_name(rendered("ha"), "Role"))
    pods = PodProcesses("ha", tmp_path / "pods")
    (job,), servers, schedulers = (pods.of(component) for component in ("credentials", "nats", "scheduler"))
    try:
        with api.serving():
            pods.accounts = {job.pod.name: api.in_pod("pointsman-credentials")}
            assert pods.start(job).wait(START_SECONDS_MAX) == 0, job.log
        pods.secrets = api.secrets
        for running in (*servers, *schedulers):
            pods.start(running)
        pods.wait_ready(*servers, *schedulers, seconds=START_SECONDS_MAX)
        replicas = replicas_of_streams(servers)
        stopped = max(servers, key=connections)  # without clients lame duck ends at once
        hook = stopped.pod.container["lifecycle"]["preStop"]["exec"]["command"]
        assert pods.start(stopped, command=hook).wait(START_SECONDS_MAX) == 0
        in_lame_duck = logged(stopped, "Entering lame duck mode")
        stopped.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]  # as the kubelet, once the hook has ended
        assert logged(stopped, 'Trapped "terminated" signal')
        stopped_at_once = "Server Exiting" in stopped.log
        pods.wait_ready(
            *(server for server in servers if server is not stopped), *schedulers, seconds=START_SECONDS_MAX
        )
        stopped.process.kill()  # type: ignore[union-attr]
        stopped.process.wait(STOP_SECONDS_MAX)  # type: ignore[union-attr]
        pods.start(stopped)
        pods.wait_ready(*servers, *schedulers, seconds=START_SECONDS_MAX)  # with streams that are current
    finally:
        pods.stop()

    routes = pods.secrets["pointsman-nats-users"]["nats-routes.conf"]
    names = [f"pointsman-nats-{number}.pointsman-nats" for number in range(3)]
    assert re.findall(r'"nats://route:\w{64}@(.*):6222"', routes) == names
    assert len(servers) == 3
    assert len(schedulers) == 2
    assert in_lame_duck
    assert not stopped_at_once
    assert set(replicas.values()) == {3}
    assert "POINTSMAN_default" in replicas


def replicas_of_streams(servers: list[Running]) -> dict[str, int]:
    found = {}
    for running in servers:
        with urlopen(running.url("monitor", "/jsz?accounts=1&streams=1&config=1"), timeout=5) as answer:
            for account in json.load(answer)["account_details"]:
                for stream in account.get("stream_detail", []):
                    found[stream["name"]] = stream["config"]["num_replicas"]
    return found


def connections(running: Running) -> int:
    with urlopen(running.url("monitor", "/varz"), timeout=5) as answer:
        return int(json.load(answer)["connections"])


def logged(running: Running, text: str) -> bool:
    deadline = time.monotonic() + START_SECONDS_MAX
    while text not in running.log:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
