"""`pointsman hit-rate` over recorded logs, and the ladder's metrics."""

import re
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from prometheus_client import REGISTRY

from pointsman.analysis.ladder_figures import LadderFigures, Rung
from pointsman.primitives import PoolName
from pointsman_cli.console.log.metrics import LadderMetrics
from pointsman_cli.main import main
from tests.support.commands import told_by

LOGS = sorted((Path(__file__).parents[2] / "golden/logs").glob("*.pmlog"))


def asked(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["hit-rate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def answered(*arguments: str) -> dict[str, Any]:
    return told_by("hit-rate", *arguments)


def test_logs_of_all_versions_are_read() -> None:
    assert LOGS
    for log in LOGS:
        found = answered("--from", str(log))
        pool = found["pool"]
        for name, tokens in pool["tokens"].items():
            assert 0 <= tokens <= pool["prompt_tokens"], (log.name, name)
        assert pool["tokens"]["delivered"] <= pool["tokens"]["perfect"] <= pool["tokens"]["unbounded"]
        assert sum(row["requests"] for row in found["tenants"]) == pool["requests"]
        assert sum(row["tokens"]["known"] for row in found["hours"]) == pool["tokens"]["known"]


def test_the_verdict_comes_first() -> None:
    found = answered("--from", str(LOGS[0]))

    assert asked("--from", str(LOGS[0])).splitlines()[0] == found["verdict"]["sentence"]


def test_commands_that_are_advised_read_the_log_that_was_counted(tmp_path: Path) -> None:
    log = shutil.copy(LOGS[0], tmp_path / "a log.pmlog")
    given = f" --from '{log}' --pool default"
    found = answered("--from", str(log), "--pool", "default")
    commands = re.findall(r"`pointsman ([a-z-]+)([^`]*)`", " ".join(gap["advice"] for gap in found["gaps"]))

    assert {"what-if", "doctor", "explain", "fleet"} == {name for name, _ in commands}
    for name, options in commands:
        assert options.startswith(given) == (name != "fleet"), "a log that is over has no fleet"


def test_a_later_beginning_counts_fewer_and_the_caches_are_still_warm() -> None:
    log = max(LOGS, key=lambda path: answered("--from", str(path))["pool"]["requests"])
    whole = answered("--from", str(log))["pool"]
    entries = told_by("doctor", "--from", str(log), exit_codes=(0, 1))["entries"]
    later = answered("--from", str(log), "--since", str(entries // 2))["pool"]
    until = answered("--from", str(log), "--until", str(entries // 2))["pool"]

    assert 0 < later["requests"] < whole["requests"]
    assert 0 < until["requests"] < whole["requests"]
    assert (
        later["tokens"]["unbounded"] / later["prompt_tokens"] >= whole["tokens"]["unbounded"] / whole["prompt_tokens"]
    )


def test_metrics_grow_with_the_ladder() -> None:
    pool, figures = PoolName("hit-rate-test"), LadderFigures()
    metrics = LadderMetrics(pool)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"pointsman_{name}_total", {"pool": pool, **labels})

    for share in (3, 4):
        for tenant in ("a", "b"):
            for tally in figures.tallies(0.0, tenant):
                tally.count(10, [share] * len(Rung))
        metrics.update(figures)
        metrics.update(figures)

    assert value("hit_rate_ladder_prompt_tokens") == 40
    assert value("hit_rate_ladder_tokens", rung="known") == 14
