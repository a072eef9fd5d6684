"""docs/upgrades.md has the one order of an upgrade; the commands of compose and Kubernetes follow it."""

import re

import pytest

from tests.support.compose import CLUSTER_FILE, ROOT, compose_services, own_services
from tests.support.manifests import OVERLAYS, WORKLOADS, by_name, matches, rendered

ORDER = ("credentials", "nats", "scheduler", "worker", "ingress")
NAMED = ("Users of NATS", "nats-servers", "Schedulers", "Workers", "Ingresses", "The others")
"""On the page, one step each."""
DEPLOYING = (ROOT / "deploy/README.md").read_text()
KUBERNETES_PAGE = (ROOT / "docs/kubernetes.md").read_text()
FOLD_MINUTES = 14
"""Measured: the whole fold of a full log of 4 GiB."""
NOT_OURS = {"credentials", "haproxy", "pointsman", "engine"}


def test_the_page_has_this_order_and_all_others_point_to_it() -> None:
    steps = re.findall(r"^\d\. \*\*(.*?)\*\*", (ROOT / "docs/upgrades.md").read_text(), re.MULTILINE)

    assert tuple(steps) == NAMED
    for page in (DEPLOYING, KUBERNETES_PAGE, (ROOT / "docs/hosts.md").read_text()):
        assert "upgrades.md#order)" in page


def test_compose_writes_the_users_first_and_replaces_every_service_of_the_cluster_in_this_order() -> None:
    (script,) = re.findall(r"^docker compose up --no-deps credentials$(.*?)^```", DEPLOYING, re.MULTILINE | re.DOTALL)
    (loop,) = re.findall(
        r"^for service in (.*); do\n  docker compose up --wait --no-deps \$service \|\| break$", script, re.MULTILINE
    )
    kinds = list(dict.fromkeys(re.sub(r"-\d$", "", service) for service in loop.split()))
    services = {name for name, service in compose_services().items() if "profiles" not in service}
    services |= {name for name in compose_services(CLUSTER_FILE) if re.search(r"-\d$", name)}

    assert tuple(kinds[: len(ORDER) - 1]) == ORDER[1:]
    assert set(loop.split()) == services - NOT_OURS


def test_compose_replaces_the_processes_of_a_profile_in_this_order_too() -> None:
    (loop,) = re.findall(
        r"^for service in (.*); do\n  docker compose --profile gpu up --wait --no-deps \$service \|\| break$",
        DEPLOYING,
        re.MULTILINE,
    )
    kinds = [service.removesuffix("-gpu") for service in loop.split()]

    assert kinds[: len(ORDER) - 2] == list(ORDER[2:])
    assert sorted(loop.split()) == sorted(service.name for service in own_services() if service.name.endswith("-gpu"))


def test_compose_gives_up_on_no_scheduler_that_folds_a_whole_log_and_on_no_server_that_fetches_one() -> None:
    services = compose_services()
    periods = {
        name: service["healthcheck"]["start_period"]
        for name, service in services.items()
        if service.get("command", [""])[0] in {"pointsman-scheduler", "nats-server"}
    }

    assert set(periods) == {"scheduler", "scheduler-gpu", "nats"}
    for period in periods.values():
        assert period.endswith("m")
        assert int(period.removesuffix("m")) > FOLD_MINUTES


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_applies_what_pods_read_and_then_one_workload_after_the_other(overlay: str) -> None:
    objects = rendered(overlay)
    applied = [[o for o in objects if matches(query, o["metadata"]["labels"])] for query in kubernetes_queries()]
    workloads = [[o["metadata"]["name"] for o in step if o["kind"] in WORKLOADS] for step in applied]

    assert workloads == [[], *([f"pointsman-{name}"] for name in ORDER)]
    assert {o["metadata"]["name"] for o in applied[0] if o["kind"] == "ConfigMap"} == set(by_name(objects, "ConfigMap"))


def test_kubernetes_goes_no_further_than_a_step_that_fails() -> None:
    (steps,) = re.findall(r"^update\(\) .*?\n(.*?)^```", KUBERNETES_PAGE, re.MULTILINE | re.DOTALL)
    subshell = re.fullmatch(r"\(\n  set -e[^\n]*\n(.*)^\)\n", steps, re.MULTILINE | re.DOTALL)

    assert subshell is not None
    assert all(line.startswith("  ") for line in subshell[1].splitlines())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_gives_up_on_no_scheduler_that_folds_a_whole_log(overlay: str) -> None:
    scheduler = by_name(rendered(overlay), "Deployment")["pointsman-scheduler"]

    assert scheduler["spec"]["progressDeadlineSeconds"] > 60 * FOLD_MINUTES


def kubernetes_queries() -> list[str]:
    """The selectors of the commands, their loop unrolled."""
    (common,) = re.findall(r'^update\(\) \{ kubectl apply -k \S+ -l "(\S+),\$1"; \}$', KUBERNETES_PAGE, re.MULTILINE)
    (loop,) = re.findall(r"^ *for process in (.*); do$", KUBERNETES_PAGE, re.MULTILINE)
    found = []
    for query in re.findall(r"^ *update '?([^\s'()]+)", KUBERNETES_PAGE, re.MULTILINE):
        found += [query.replace("$process", process) for process in (loop.split() if "$" in query else [""])]
    return [f"{common},{query}" for query in found]
