"""Tables for the terminal, JSON for programs. With several seeds, tables show the mean and the largest distance from
it; JSON has each run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from pointsman.simulation.goodput import TARGET, Goodput
from pointsman.simulation.metrics import Attainment, Report, mean_known
from pointsman_cli.formatting import count, milliseconds, ratio, share
from pointsman_cli.output_file import json_of
from pointsman_cli.simulate.experiment import Cell, CellResult, Source, search_key
from pointsman_cli.simulate.variants import Variant
from pointsman_cli.terminal import table

RECONSTRUCTION_NOTE = (
    "is a reconstruction of a trace that was not to be had, not the real one: its numbers are indications."
)


Goodputs = Mapping[tuple[str, int], Goodput]


def run_row(result: CellResult, goodputs: Goodputs) -> dict[str, Any]:
    """A run as JSON has it: what ran, the figures that matter most, and the rest."""
    cell, report = result.cell, result.report
    scenario = cell.scenario
    goodput = goodputs.get(search_key(cell))
    return {
        "workload": cell.source.name,
        "policy": cell.variant.policy,
        "ordering": scenario.ordering,
        "admission": scenario.admission,
        "eviction": scenario.eviction,
        "instances": scenario.instances,
        "qps": cell.qps,
        "seed": scenario.seed,
        "effective_capacity": report.effective_capacity,
        **({"goodput_qps": goodput.qps} if goodput else {}),
        "ttft_p50_s": report.ttft.p50_s,
        "ttft_p90_s": report.ttft.p90_s,
        "ttft_p99_s": report.ttft.p99_s,
        "tpot_p90_s": report.tpot.p90_s,
        "e2e_p50_s": report.e2e.p50_s,
        **_of(report, "hit_rate", "load_cv", "migrations", "rejections", "jain"),
        **_of(report, "requests", "finished", "failures", "unfinished"),
        "tpot_p50_s": report.tpot.p50_s,
        "tbt_p90_s": report.tbt.p90_s,
        "effective_capacity_with_tbt": report.effective_capacity_with_tbt,
        "e2e_p90_s": report.e2e.p90_s,
        "well_behaved_ttft_p50_s": report.well_behaved_ttft.p50_s,
        "well_behaved_ttft_p90_s": report.well_behaved_ttft.p90_s,
        **_of(report, "hit_share_of_bound", "loaded_share", "jain_of_amounts", "service_per_s"),
        **_of(report, "prediction_error_p50_s", "prediction_error_p90_s", "prediction_bias_s", "upper_coverage"),
        "decision_us": report.decision_us,
        "attainment_by_length": [
            {
                "tokens_min": band.tokens_min,
                "tokens_max": band.tokens_max,
                **_attainment(band.attainment),
                "prediction_error_p50": band.prediction_error_p50,
                "prediction_error_p90": band.prediction_error_p90,
                "upper_coverage": band.upper_coverage,
            }
            for band in report.by_length
        ],
        "attainment_by_tenant": {tenant: _attainment(part) for tenant, part in report.by_tenant.items()},
        **({"goodput_at_least": goodput.at_least, "goodput_points": goodput.points} if goodput else {}),
        "scenario": scenario,
        "arrivals": cell.source.arrivals,
        "warmup": cell.warmup,
        "reconstruction": cell.source.is_reconstruction,
    }


def _of(report: Report, *names: str) -> dict[str, Any]:
    return {name: getattr(report, name) for name in names}


def _attainment(part: Attainment) -> dict[str, Any]:
    return {"requests": part.requests, "attainment": part.share}


def as_json(results: Iterable[CellResult], goodputs: Goodputs) -> bytes:
    return json_of({"runs": [run_row(result, goodputs) for result in results]})


# --- Tables ---


def headline(result: CellResult, seeds: int) -> Text:
    cell, scenario = result.cell, result.cell.scenario
    engine = "prefill only" if scenario.prefill_only else "decoding shares the engine"
    if scenario.split != (0, 0):
        begins = ", roles switched by the scaler" if scenario.role_switching else ""
        engine = f"{scenario.split[0]} prefill, {scenario.split[1]} decode{begins}"
    facts = [
        f"{cell.source.name}: {cell.warmup + result.report.requests} requests, the first {cell.warmup} not counted",
        f"{scenario.instances} instances of {scenario.profile} ({engine})",
        f"TTFT objective {scenario.slo_ttft_s:g} s",
    ]
    if seeds > 1:
        facts.append(f"mean of {seeds} seeds")
    if scenario.load_lag_s:
        facts.append(f"load lags by {scenario.load_lag_s:g} s")
    return Text(", ".join(facts), style="bold")


def reconstruction_note(source: Source) -> Text | None:
    return Text(f"{source.name} {RECONSTRUCTION_NOTE}", style="yellow") if source.is_reconstruction else None


def capacity_table(results: Sequence[CellResult], goodputs: Goodputs) -> Table:
    cells = _by_variant_and_rate(results)
    rates = sorted({result.cell.qps for result in results})
    goodput_column = [f">goodput at {TARGET:.0%}"] if goodputs else []
    made = table("effective capacity at requests/s:", *(f">{rate:g}" for rate in rates), *goodput_column)
    best = {
        rate: _best(
            mean_known(report.effective_capacity for report in group)
            for (_, qps), group in cells.items()
            if qps == rate
        )
        for rate in rates
    }
    best_goodput = _best(fmean(found) for found in _goodput_rates(goodputs).values())
    for variant, label in labels(results):
        row = [_capacity_cell(cells.get((variant.key, rate), []), best[rate]) for rate in rates]
        if goodputs:
            row.append(_goodput_cell(variant, goodputs, best_goodput))
        made.add_row(label, *row)
    return made


END_TO_END = "e2e P50"
Column = tuple[str, Callable[[Report], float | None], Callable[[float], str]]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def worst_length(report: Report) -> float | None:
    return min((band.attainment.share for band in report.by_length), default=None)


def worst_tenant(report: Report) -> float | None:
    return min((part.share for part in report.by_tenant.values()), default=None) if len(report.by_tenant) > 1 else None


COLUMNS: Sequence[Column] = (
    ("TTFT P50", lambda r: r.ttft.p50_s, _seconds),
    ("P90", lambda r: r.ttft.p90_s, _seconds),
    ("P99", lambda r: r.ttft.p99_s, _seconds),
    ("TPOT P90", lambda r: r.tpot.p90_s, milliseconds),
    ("TBT P90", lambda r: r.tbt.p90_s, milliseconds),
    ("both SLOs", lambda r: r.effective_capacity_with_tbt if r.tbt.p90_s is not None else None, share),
    (END_TO_END, lambda r: r.e2e.p50_s, _seconds),
    ("hit rate", lambda r: r.hit_rate, share),
    ("of bound", lambda r: r.hit_share_of_bound, share),
    ("load CV", lambda r: r.load_cv, ratio),
    ("moved", lambda r: r.migrations, count),
    ("rejected", lambda r: r.rejections, count),
    ("failed", lambda r: r.failures, count),
    ("Jain", lambda r: r.jain if len(r.by_tenant) > 1 else None, ratio),
    ("worst length tenth", worst_length, share),
    ("worst tenant", worst_tenant, share),
    ("prediction off P50", lambda r: r.prediction_error_p50_s, _seconds),
    ("within upper", lambda r: r.upper_coverage, share),
    ("decision", lambda r: r.decision_us, lambda value: f"{value:,.0f} us"),
)
COLUMNS_MAX = 12


def details_tables(results: Sequence[CellResult], qps: float) -> Iterator[Table]:
    """One, or two where one would be too wide: cells that lack room lose digits."""
    at_rate = [result for result in results if result.cell.qps == qps]
    shown = [column for column in _columns(at_rate) if any(column[1](result.report) for result in at_rate)]
    groups = _by_variant_and_rate(at_rate)
    half = -(-len(shown) // 2)
    for columns in [shown] if len(shown) <= COLUMNS_MAX else (shown[:half], shown[half:]):
        made = table(f"at {qps:g} requests/s", *(f">{heading}" for heading, _, _ in columns))
        for variant, label in labels(results):
            group = groups.get((variant.key, qps))
            if group:
                values = [(mean_known(map(value_of, group)), text) for _, value_of, text in columns]
                made.add_row(label, *("-" if value is None else text(value) for value, text in values))
        yield made


def _columns(results: Iterable[CellResult]) -> Sequence[Column]:
    if all(result.cell.scenario.prefill_only for result in results):
        return [column for column in COLUMNS if column[0] != END_TO_END]
    return COLUMNS


def labels(results: Iterable[CellResult]) -> list[tuple[Variant, str]]:
    seen = {result.cell.variant.key: result.cell.variant for result in results}
    return [(variant, variant.label(seen.values())) for variant in seen.values()]


def in_order(results: Iterable[CellResult], cells: Sequence[Cell]) -> list[CellResult]:
    places = {_place(cell): number for number, cell in enumerate(cells)}
    return sorted(results, key=lambda result: places[_place(result.cell)])


def _place(cell: Cell) -> tuple[str, float, int]:
    return cell.variant.key, cell.qps, cell.scenario.seed


def _by_variant_and_rate(results: Iterable[CellResult]) -> dict[tuple[str, float], list[Report]]:
    groups: dict[tuple[str, float], list[Report]] = {}
    for result in results:
        groups.setdefault((result.cell.variant.key, result.cell.qps), []).append(result.report)
    return groups


def _best(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _capacity_cell(group: Sequence[Report], best: float | None) -> Text:
    values = [value for report in group if (value := report.effective_capacity) is not None]
    return _with_spread(values, best, lambda value: f"{value:.3f}")


def _goodput_cell(variant: Variant, goodputs: Goodputs, best: float | None) -> Text:
    text = _with_spread(_goodput_rates(goodputs).get(variant.key, []), best, lambda value: f"{value:.2f}/s")
    own = [goodput for (key, _), goodput in goodputs.items() if key == variant.key]
    return Text("at least ") + text if any(goodput.at_least for goodput in own) else text


def _goodput_rates(goodputs: Goodputs) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {}
    for (key, _), goodput in goodputs.items():
        rates.setdefault(key, []).append(goodput.qps)
    return rates


def _with_spread(values: Sequence[float], best: float | None, shown: Callable[[float], str]) -> Text:
    if not values:
        return Text("-")
    mean = fmean(values)
    text = Text(shown(mean), style="bold" if best is not None and mean >= best else "")
    if len(values) > 1:
        text.append(f" ±{max(abs(value - mean) for value in values):.3f}", style="dim")
    return text
