"""A real Prometheus (Debian's) that scrapes the processes of a fleet."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import yaml  # type: ignore[import-untyped]

from pointsman.adapters.tcp_ports import free_ports
from pointsman_cli.discovery import FleetFile
from tests.support.debian_programs import debian_program

SCRAPE_SECONDS = 1
STOP_SECONDS_MAX = 30


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str, **more: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises HTTPError if Prometheus refuses the expression."""
        found: list[dict[str, Any]] = self._get("query", query=expression, **more)["result"]
        return found

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        bounds = {"start": str(start), "end": str(end), "step": str(step)}
        found: list[dict[str, Any]] = self._get("query_range", query=expression, **bounds)["result"]
        return found

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    @property
    def answers(self) -> bool:
        try:
            return bool(self._get("query", query="vector(1)"))
        except (URLError, OSError):
            return False

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(query)}", timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)["data"]
        return found


@contextmanager
def running_prometheus(
    directory: Path, targets: Mapping[str, Sequence[str]], rules: Path, *, scrape_seconds: int = SCRAPE_SECONDS
) -> Iterator[Prometheus]:
    """`targets`: addresses by job. Alerts of `rules` fire at once: how long each waits is tested by promtool."""
    program = debian_program("prometheus", "prometheus", "trixie")
    groups = yaml.safe_load(rules.read_text())
    for group in groups["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    (directory / "alerts.yaml").write_text(yaml.safe_dump(groups))
    jobs = [{"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in targets.items()]
    seconds = f"{scrape_seconds}s"
    intervals = {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds}
    configuration = {"global": intervals, "rule_files": ["alerts.yaml"], "scrape_configs": jobs}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *arguments, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(STOP_SECONDS_MAX)


def targets_of(fleet: FleetFile) -> dict[str, list[str]]:
    """The addresses at which the fleet's processes tell their metrics, by job."""
    roles = {process.role for process in fleet.processes} - {"nats", "engine"}
    return {f"pointsman-{role}": [urlsplit(p.probes).netloc for p in fleet.of_role(role)] for role in sorted(roles)}
