"""Output of `pointsman up`: progress of the start, the table of processes, and next commands."""

import json
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pointsman_cli.discovery import FleetFile
from pointsman_cli.up.plan import archive_file
from pointsman_cli.up.runner import Condition, FleetRunner

ROLE_NOTES = {
    "nats": "the log and the commands",
    "scheduler": "decides where requests go",
    "ingress": "OpenAI-compatible HTTP",
    "rebalancer": "moves waiting requests",
    "scaler": "sizes the pool",
    "recorder": "archives the log into SQL",
    "console": "a web page of all this",
    "engine": "serves the model",
    "worker": "agent beside an engine",
}


class StartDisplay:
    def __init__(self, runner: FleetRunner) -> None:
        self._runner = runner
        self._spinner = Spinner("dots")

    def __rich__(self) -> RenderableType:
        children, conditions = self._runner.children, self._runner.conditions
        waiting = [child for child in children if conditions[child.name] is not Condition.READY]
        ready = len(children) - len(waiting)
        self._spinner.update(text=f"starting the fleet: {ready} of {len(children)} processes ready")
        lines = (f"  {child.name}{': ' + child.waiting_for if child.waiting_for else ''}" for child in waiting)
        return Group(self._spinner, *(Text(line, style="dim") for line in lines))


def print_fleet(console: Console, fleet: FleetFile, seconds: float, *, requires_keys: bool = False) -> None:
    console.print(_table(fleet, seconds))
    console.print()
    console.print("Try it", style="bold")
    if requires_keys:
        create = f"{_program()} keys create --from {shlex.quote(fleet.data)} me"
        console.print(Text(f"{create}     # prints a key once; then: KEY=that key"), soft_wrap=True)
    console.print(Text(curl_line(fleet, requires_keys=requires_keys)), soft_wrap=True)
    console.print()
    for label, text in _hints(fleet):
        console.print(Text.assemble((f"{label:<9}", "bold"), text), soft_wrap=True)


def curl_line(fleet: FleetFile, *, requires_keys: bool = False) -> str:
    body = {
        "model": fleet.model,
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Why does a prefix cache make the first token faster?"}],
    }
    headers = "-H 'content-type: application/json'" + ' -H "authorization: Bearer $KEY"' * requires_keys
    return f"curl -N {fleet.ingress}/v1/chat/completions {headers} -d {shlex.quote(json.dumps(body))}"


def _table(fleet: FleetFile, seconds: float) -> Table:
    speed = f", {fleet.speed:g} times real time" if fleet.speed != 1 else ""
    table = Table(
        title=f"Pointsman: {fleet.model} by {fleet.policy}, TTFT objective {fleet.slo_ttft:g} s{speed} (ready in {seconds:.1f} s)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("process", style="bold")
    table.add_column("pid", justify="right")
    table.add_column("URL")
    table.add_column("what it does", style="dim")
    for process in fleet.processes:
        note = ROLE_NOTES[process.role] if process.pid else "was running already"
        table.add_row(process.name, str(process.pid) if process.pid else "-", process.url, note)
    return table


def _program() -> str:
    """As make calls it, where no shell would find it."""
    return "pointsman" if shutil.which("pointsman") else sys.argv[0]


def _hints(fleet: FleetFile) -> list[tuple[str, str]]:
    here = _program()
    models = (
        f"model {fleet.model}" if not fleet.further else f"models {', '.join([fleet.model, *fleet.further.values()])}"
    )
    others = "".join(f", {other.url}/v1" for other in fleet.of_role("ingress")[1:])
    probes = ", ".join(f"{ingress.probes}/readyz" for ingress in fleet.of_role("ingress"))
    instances = f"   (of engines that the scaler starts: {fleet.data}/instances/)" if fleet.of_role("scaler") else ""
    return [
        ("API", f"{fleet.ingress}/v1{others}   (any OpenAI client; {models})"),
        ("Health", f"{probes}   (and /metrics, /openapi.json)"),
        *(
            ("Console", f"{url.url}   (to drain or scale there: the token in {fleet.data}/console-token)")
            for url in fleet.of_role("console")
        ),
        ("Watch", f"{here} fleet --watch     {here} tap     {here} bench --help"),
        ("SQL", f"sqlite3 {archive_file(Path(fleet.data))}"),
        ("Logs", f"{fleet.data}/logs/NAME.log{instances}"),
        ("Data", fleet.data),
        ("Stop", "Ctrl-C"),
    ]
