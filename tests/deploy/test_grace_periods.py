"""Whoever stops a process gives it the time that its code takes at most. Else it is killed while it saves or drains."""

from collections.abc import Iterator

import pytest

from pointsman.runtime.supervision import STOP_SECONDS_MAX
from pointsman_ingress.settings import IngressSettings
from pointsman_worker.main import STOP_SECONDS_MAX as WORKER_STOP_SECONDS_MAX
from tests.support.compose import compose_services
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


OURS = [
    pytest.param(program, seconds, id=where) for where, program, seconds in granted() if program.startswith("pointsman")
]


@pytest.mark.parametrize(("program", "seconds"), OURS)
def test_a_process_is_not_killed_before_it_gives_up(program: str, seconds: int) -> None:
    assert seconds >= LONGER.get(program, STOP_SECONDS_MAX) + MARGIN_SECONDS


def test_every_deployment_is_judged() -> None:
    judged = {str(parameter.id) for parameter in OURS}

    for process in ("scheduler", "ingress", "worker", "rebalancer", "scaler", "recorder", "console"):
        where = {f"systemd/pointsman-{process}", f"compose/{process}", f"single/pointsman-{process}"}
        assert where <= judged
