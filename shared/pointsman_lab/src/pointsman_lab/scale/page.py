"""Renders `docs/scale.md` from `page.md.j2` and the numbers of scale.json. Raises KeyError or UndefinedError for a number
that is not there: nothing is said without one. Verdicts are computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Row = dict[str, Any]
"""Of one size, as `measure.measured` gives it."""


@dataclass(frozen=True)
class Target:
    """`most`: of the figure `name`, with TARGET_INSTANCES and TARGET_RATE."""

    what: str
    name: str
    most: float
    unit: str

    def verdict(self, row: Row) -> str:
        value = row[self.name]
        if value is None:
            return "not measured"
        if value > self.most:
            return "**missed**"
        rate = row["requests_a_second"]
        return "met" if rate >= TARGET_RATE else f"**met at {rate:g}/s only**"


TARGETS = (
    Target("log", "log_kb_a_second", 2_000.0, "kB/s"),
    Target("decision, P99", "decision_p99_ms", 2.0, "ms"),
    Target("take-over", "take_over_seconds", 2.0, "s"),
    Target("start from a checkpoint", "start_seconds", 10.0, "s"),
)
TARGET_INSTANCES = 512
TARGET_RATE = 400
COLUMNS = (
    ("instances", "instances"),
    ("requests/s", "requests_a_second"),
    ("decisions/s", "decisions_a_second"),
    ("decision, P50", "decision_p50_ms"),
    ("P99", "decision_p99_ms"),
    ("log, kB/s", "log_kb_a_second"),
    ("bytes a request", "log_bytes_a_request"),
    ("bytes an engine and second", "log_bytes_an_engine_and_second"),
    ("fold, entries/s", "fold_entries_a_second"),
    ("take-over, s", "take_over_seconds"),
    ("start, s", "start_seconds"),
)
CONTENTION = (
    ("instances", "instances"),
    ("waits, % of the time", "leader_waits_percent"),
    ("decision, P50", "decision_p50_ms"),
    ("P99", "decision_p99_ms"),
    ("with all: waits, %", "all_waits_percent"),
    ("P50", "all_p50_ms"),
    ("P99", "all_p99_ms"),
)


def page(rows: list[Row]) -> str:
    """As Markdown."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    ordered = sorted(rows, key=lambda row: int(row["instances"]))
    return environment.get_template("page.md.j2").render(
        rows=ordered,
        largest=ordered[-1],
        target_rate=TARGET_RATE,
        targets=TARGETS if ordered[-1]["instances"] >= TARGET_INSTANCES else (),
        results=table(ordered, COLUMNS),
        contention=table([beside(row) for row in ordered], CONTENTION),
        memory=by_process(ordered, "memory_mb"),
        cpu=by_process(
            [row["with_followers"] | {"instances": row["instances"]} for row in ordered], "cpu_ms_a_request"
        ),
        kinds=kinds(ordered[-1]["bytes_by_kind"]),
        shown=shown,
    )


def beside(row: Row) -> Row:
    """With the figures of the same pool with all processes."""
    everyone = row["with_followers"]
    return row | {
        "all_waits_percent": everyone["leader_waits_percent"],
        "all_p50_ms": everyone["decision_p50_ms"],
        "all_p99_ms": everyone["decision_p99_ms"],
    }


def table(rows: list[Row], columns: tuple[tuple[str, str], ...]) -> str:
    return markdown([title for title, _ in columns], [[shown(row[name]) for _, name in columns] for row in rows])


def by_process(rows: list[Row], name: str) -> str:
    """A column for each process that any row has."""
    processes = list(dict.fromkeys(process for row in rows for process in row[name]))
    cells = [[shown(row["instances"]), *(shown(row[name].get(process)) for process in processes)] for row in rows]
    return markdown(["instances", *processes], cells)


def kinds(sizes: dict[str, int]) -> str:
    """Shares of the payload, largest first."""
    whole = sum(sizes.values())
    return ", ".join(f"{kind} {size / whole:.0%}" for kind, size in sizes.items() if size >= whole / 100)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"
