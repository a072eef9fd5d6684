"""Compares record, re-simulation and change: table, JSON, and results for the plots of `simulate`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from pointsman.analysis.comparison import Side
from pointsman.analysis.recorded_traffic import Record
from pointsman.contracts.reasons import TENANT_LIMITS
from pointsman.simulation.metrics import Report, percentile
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.workload import mean_rate
from pointsman_cli.formatting import count, milliseconds, ratio, share
from pointsman_cli.simulate.experiment import Cell, CellResult, Source, series_of
from pointsman_cli.simulate.variants import Variant
from pointsman_cli.terminal import table

TENANTS_SHOWN_MAX = 12
NONE = "-"

Row = tuple[str, Callable[[Report], float | None], Callable[[float], str], bool | None]
"""Heading, value, format, and whether more is better (None: neither)."""


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


ROWS: Sequence[Row] = (
    ("effective capacity", lambda r: r.effective_capacity, share, True),
    ("TTFT P50", lambda r: r.ttft.p50_s, _seconds, False),
    ("TTFT P90", lambda r: r.ttft.p90_s, _seconds, False),
    ("TTFT P99", lambda r: r.ttft.p99_s, _seconds, False),
    ("TPOT P50", lambda r: r.tpot.p50_s, milliseconds, False),
    ("hit rate", lambda r: r.hit_rate, share, True),
    ("rejections", lambda r: r.rejections, count, False),
    ("failures", lambda r: r.failures + r.unfinished, count, False),
    ("moved", lambda r: r.migrations, count, None),
    ("load CV", lambda r: r.load_cv, ratio, False),
)


class Compared(NamedTuple):
    """A row as text: three values, and how far the change is from the re-simulation. `better`: None if neither, or the
    same."""

    heading: str
    values: tuple[str, str, str]
    change: str
    better: bool | None


def compared(recorded: Side, again: Side, changed: Side) -> list[Compared]:
    """Rows of which any value is not 0."""
    found = []
    for heading, value_of, text, more_is_better in ROWS:
        values = [value_of(side.report) for side in (recorded, again, changed)]
        if any(values):
            first, second, third = (NONE if value is None else text(value) for value in values)
            found.append(
                Compared(heading, (first, second, third), *_change(values[1], values[2], text, more_is_better))
            )
    return found


def _change(
    before: float | None, after: float | None, text: Callable[[float], str], more_is_better: bool | None
) -> tuple[str, bool | None]:
    if before is None or after is None:
        return NONE, None
    shown = text(abs(after - before))
    if shown == text(0.0):
        return "same", None
    is_more = after > before
    return ("+" if is_more else "-") + shown, None if more_is_better is None else is_more == more_is_better


def table_of(recorded: Side, again: Side, changed: Side) -> Table:
    rows = table("", ">recorded", ">re-simulated", f">{changed.note}", ">change")
    rows.columns[3].no_wrap = False
    for row in compared(recorded, again, changed):
        style = "" if row.better is None else "green" if row.better else "red"
        rows.add_row(row.heading, *row.values, Text(row.change, style=style))
    return rows


def cells(sides: Sequence[Side], record: Record, name: str) -> list[CellResult]:
    rate = round(mean_rate(record.requests[record.warmup :]), 2)
    source = Source(trace=None, generator=name, requests=len(record.requests), input_tokens_max=0)
    return [_cell_result(one, source, rate, record.warmup) for one in sides]


def _cell_result(one: Side, source: Source, rate: float, warmup: int) -> CellResult:
    scenario = one.scenario
    variant = Variant(
        policy=one.note, routing=scenario.routing, ordering=scenario.ordering, admission=scenario.admission
    )
    cell = Cell(source=source, variant=variant, scenario=scenario, qps=rate, warmup=warmup)
    return CellResult(cell, one.report, series_of(one.outcome, warmup))


def by_instance(outcome: Outcome, warmup: int) -> dict[str, dict[str, Any]]:
    groups = _grouped(outcome.rows[warmup:], lambda row: row.instance or "")
    return {
        name: {"requests": len(rows), "on_time": sum(row.on_time for row in rows) / len(rows), **_ttft(rows)}
        for name, rows in groups
        if name
    }


def by_tenant(outcome: Outcome, warmup: int) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "requests": len(rows),
            "served": sum(row.end == "finished" for row in rows),
            "over_limits": sum(row.reason in TENANT_LIMITS for row in rows),
            **_ttft(rows),
        }
        for name, rows in _grouped(outcome.rows[warmup:], lambda row: row.tenant)
    }


def _grouped(rows: Sequence[RequestRow], by: Callable[[RequestRow], str]) -> list[tuple[str, list[RequestRow]]]:
    groups: dict[str, list[RequestRow]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return sorted(groups.items())


def _ttft(rows: Sequence[RequestRow]) -> dict[str, float | None]:
    return {"ttft_p90_s": percentile([row.ttft for row in rows if row.ttft is not None], 90)}


def tenants_table(recorded: Side, again: Side, changed: Side, warmup: int) -> Table:
    """Tenants with most requests: those served, over limits, and TTFT P90."""
    rows = table("tenant", ">requests", ">recorded", ">re-simulated", ">changed")
    known = [by_tenant(one.outcome, warmup) for one in (recorded, again, changed)]
    names = sorted(known[0], key=lambda name: (-known[0][name]["requests"], name))
    for name in names[:TENANTS_SHOWN_MAX]:
        rows.add_row(Text(name), count(known[0][name]["requests"]), *(_served(one[name]) for one in known))
    if len(names) > TENANTS_SHOWN_MAX:
        rows.add_row(f"{len(names) - TENANTS_SHOWN_MAX:,} more", "", "", "", "")
    return rows


def _served(figures: dict[str, Any]) -> str:
    slow = "-" if figures["ttft_p90_s"] is None else _seconds(figures["ttft_p90_s"])
    refused = f", {figures['over_limits']:,} over limits" if figures["over_limits"] else ""
    return f"{figures['served']:,} served, P90 {slow}{refused}"


def as_json(one: Side, warmup: int) -> dict[str, Any]:
    return {
        "note": one.note,
        "report": msgspec.to_builtins(one.report),
        "by_instance": by_instance(one.outcome, warmup),
        "by_tenant": by_tenant(one.outcome, warmup),
        "scenario": msgspec.to_builtins(one.scenario, str_keys=True),
    }
