"""Series of engines that left go away; with several processes they leave the page."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import REGISTRY, generate_latest

from pointsman.primitives import WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.engine_series import KEPT_WALL_SECONDS, EngineSeries
from pointsman.runtime.metrics_page import METRICS_DIRECTORY

POOL = "rollouts"


def engines_shown() -> set[str]:
    lines = generate_latest(REGISTRY).decode().splitlines()
    return {line.split('engine="')[1].split('"')[0] for line in lines if f'pool="{POOL}"' in line and "engine=" in line}


def count(engine: str) -> None:
    telemetry.PROMPT_TOKENS.labels(POOL, "m", engine).inc()
    telemetry.CACHE_PREDICTIONS.labels(POOL, engine, "equal").inc()
    telemetry.KV_EVENTS.labels(POOL, engine, "stored").inc()


def test_counters_of_an_engine_that_left_are_read_once_more_and_then_go() -> None:
    series, present = EngineSeries(POOL), ["pod-b"]
    for engine in ("pod-a", "pod-b"):
        count(engine)
    telemetry.PROMPT_TOKENS.labels("another", "m", "pod-a").inc()

    assert not series.update(present, WallSeconds(10.0))
    assert not series.update(present, WallSeconds(9.0) + KEPT_WALL_SECONDS)
    assert engines_shown() == {"pod-a", "pod-b"}
    assert series.update(present, WallSeconds(10.0) + KEPT_WALL_SECONDS)
    assert engines_shown() == {"pod-b"}
    assert REGISTRY.get_sample_value(
        "pointsman_prompt_tokens_total", {"pool": "another", "model": "m", "engine": "pod-a"}
    )


def test_an_engine_that_comes_back_in_time_keeps_its_counters() -> None:
    series = EngineSeries(POOL)
    count("pod-c")
    series.update(["pod-b"], WallSeconds(0.0))
    series.update(["pod-b", "pod-c"], WallSeconds(60.0))

    series.update(["pod-b"], WallSeconds(130.0))

    assert "pod-c" in engines_shown()


def test_a_request_that_ends_long_after_its_engine_left_leaves_nothing_behind() -> None:
    series = EngineSeries(POOL)
    for at in (0.0, 1000.0):
        count("pod-d")
        series.update([], WallSeconds(at))
        series.update([], WallSeconds(at) + KEPT_WALL_SECONDS)

        assert "pod-d" not in engines_shown()


def test_of_a_thousand_rollouts_only_the_newest_pods_have_series() -> None:
    series, now, pods = EngineSeries(POOL), 0.0, [""]
    for rollout in range(1000):
        pods = [f"pod-{rollout}-{number}" for number in range(4)]
        for pod in pods:
            count(pod)
        now += 3 * float(KEPT_WALL_SECONDS)
        series.update(pods, WallSeconds(now))
        series.update(pods, WallSeconds(now + float(KEPT_WALL_SECONDS)))

    assert engines_shown() == set(pods)


SEVERAL = """
from pointsman.primitives import WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.engine_series import EngineSeries
from pointsman.runtime.metrics_page import metrics_page

def shown():
    return sorted({line.split('engine="')[1].split('"')[0] for line in metrics_page().decode().splitlines() if "engine=" in line})

series = EngineSeries("p")
for pod in ("pod-a", "pod-b", "pod-of-an-earlier-process", "other"):
    telemetry.PROMPT_TOKENS.labels("p", "m", pod).inc()
for now, pods in ((0.0, ["pod-a", "pod-b"]), (10.0, ["pod-b"]), (129.0, ["pod-b"]), (131.0, ["pod-b"]), (300.0, ["pod-a", "pod-b"])):
    print(series.update(pods, WallSeconds(now)), *shown())
"""


def test_with_several_processes_the_page_leaves_them_out_until_they_are_back(tmp_path: Path) -> None:
    environment = {**os.environ, METRICS_DIRECTORY: str(tmp_path)}
    printed = subprocess.run(
        [sys.executable, "-c", SEVERAL], env=environment, capture_output=True, check=True, text=True
    )

    assert printed.stdout.splitlines() == [
        "False other pod-a pod-b",
        "False other pod-a pod-b",
        "False other pod-a pod-b",
        "True other pod-b",
        "False other pod-a pod-b",
    ]
