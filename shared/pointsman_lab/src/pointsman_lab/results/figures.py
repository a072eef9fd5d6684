"""The figures of the papers, as far as simulation has them: which of our pictures stands for which, and its numbers.

Pictures are drawn from runs, the text and the tables beside them from the numbers. What a figure of the DualMap paper
shows is known here from the issue that asked for it for Figures 1 and 12 only; for the others the page says which
question our picture answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pointsman_cli.simulate.experiment import CellResult
from pointsman_lab.results.markdown import HEADINGS, code, has, metric, table, window
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies import OURS, PAPER, Metric, Study

PICTURES = "results"
"""Directory of the pictures, beside the page."""

WORKLOADS = ("conversation", "tools")
HEAT_ROWS = ("cache_affinity", "least_loaded", "min_ttft", "preble", f"dualmap, {PAPER}", OURS)
REBALANCED = (
    ("fresh", "fresh"),
    ("lag", "0.5 s old"),
    ("slow", "slow instance"),
    ("hot", "hot prefixes"),
)
EVICTIONS = (("random", "random"), ("round-robin", "round robin"))


def figures_section(numbers: Numbers, studies: Sequence[Study]) -> str:
    """Every figure whose studies were run."""
    parts = [part for make in SECTIONS for part in make(numbers, studies)]
    return "\n".join(("## The papers' figures", "", *parts)) if parts else ""


def draw_figures(
    studies: Sequence[Study], results: Mapping[str, Sequence[CellResult]], numbers: Numbers, out: Path
) -> None:
    """Draw what `figures_section` shows, into `out`. Raises OSError."""
    # Imported late: matplotlib takes a second, and who only reads numbers does not have it.
    from pointsman_cli.simulate import plots
    from pointsman_lab.results.pictures import Bars, draw_bars

    drawings = (
        ("fig01-pareto", "DualMap, Figure 1", plots.hit_rate_against_cv),
        ("fig03-capacity", "for DualMap, Figure 3", plots.capacity_against_rate),
        ("fig04-ttft", "for DualMap, Figure 4", plots.ttft_distribution),
        ("fig05-pending", "for DualMap, Figure 5", plots.pending_over_time),
        ("prompt-lengths", "", plots.attainment_by_length),
    )
    rates = {study.key: study.telling_rate for study in studies}
    for workload in WORKLOADS:
        runs = results.get(f"placement-{workload}", ())
        for name, label, draw in drawings if runs else ():
            shown = _hottest(runs, rates[f"placement-{workload}"]) if draw is plots.pending_over_time else runs
            plots.draw_plot(draw, shown, out / f"{name}-{workload}.png", label=label)
    if "elasticity" in results:
        plots.draw_plot(plots.timeline, results["elasticity"], out / "fig12-elasticity.png", label="DualMap, Figure 12")
    for file, panels in _bar_charts(numbers).items():
        draw_bars([Bars(*panel) for panel in panels], out / file, label=BAR_LABELS[file])


def _hottest(runs: Sequence[CellResult], rate: float) -> list[CellResult]:
    """What the heat map shows: a few rows, at the rate of the table beside it."""
    return [run for run in runs if run.cell.variant.called in HEAT_ROWS and run.cell.qps == rate]


# --- DualMap ---

Telling = tuple[str, str, dict[str, dict[str, float]], bool]
"""Title and unit of a panel, its bars, value by group and by name, and whether its axis is logarithmic."""


def _pareto(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    yield from _of_placement(
        numbers,
        studies,
        "DualMap, Figure 1: hit rate against balance",
        "Each policy by its hit rate and by the coefficient of variation of pending tokens across instances, mean over "
        "time. The line joins those that no other beats in both.",
        "fig01-pareto",
        ("hit_rate", "load_cv"),
    )


def _capacity(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    yield from _of_placement(
        numbers,
        studies,
        "DualMap, Figure 3: effective capacity against rate",
        "Stands for Figure 3: effective request capacity and goodput are what the paper's repository calls its primary "
        "results. Numbers: the tables of [placement alone](#placement-alone-conversation).",
        "fig03-capacity",
        (),
    )


def _latency(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    yield from _of_placement(
        numbers,
        studies,
        "DualMap, Figure 4: time to first token",
        "Stands for Figure 4: its abstract measures by TTFT, and a distribution says what one share on time does not. A "
        "curve that ends below 100% belongs to a policy that never served the rest.",
        "fig04-ttft",
        ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    )


def _pending(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    yield from _of_placement(
        numbers,
        studies,
        "DualMap, Figure 5: where work waits",
        "Stands for Figure 5: pending prompt tokens of each instance over time show the hotspots that affinity makes and "
        "balance removes. *At the busiest*: part of all pending tokens, mean over time; even would be an eighth.",
        "fig05-pending",
        ("busiest_share", "load_cv"),
    )


def _of_placement(
    numbers: Numbers, studies: Sequence[Study], title: str, text: str, picture: str, metrics: Sequence[Metric]
) -> Iterator[str]:
    """A figure drawn for both workloads, and its numbers side by side."""
    shown = [(key, f"placement-{key}") for key in WORKLOADS if has(numbers, f"placement-{key}")]
    if not shown:
        return
    rates = {study.key: study.telling_rate for study in studies}
    yield f"### {title}\n\n{text}\n"
    yield "\n".join(_image(f"{picture}-{workload}.png", f"{title}, {workload}") for workload, _ in shown) + "\n"
    if metrics:
        head = ["policy"]
        for workload, key in shown:
            head += [f"{workload} {rates[key]:g}/s: {HEADINGS[name][0]}" for name in metrics]
        rows = [
            [code(row)]
            + [metric(numbers.studies[key].point(row, rates[key]), name) for _, key in shown for name in metrics]
            for row in numbers.studies[shown[0][1]].rows()
        ]
        yield table(head, rows) + "\n"


def _elasticity(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    if not has(numbers, "elasticity"):
        return
    study = next(study for study in studies if study.key == "elasticity")
    points = numbers.studies["elasticity"].points
    head = ["policy", *(f"{name}, {start:g}-{end:g} s" for name, start, end in study.windows)]
    yield f"### DualMap, Figure 12: elasticity\n\n{study.about} Share on time by the time of arrival.\n"
    yield _image("fig12-elasticity.png", "Share on time, pending tokens and ready instances over time") + "\n"
    yield table(head, [[code(point.row), *map(window, point.windows)] for point in points]) + "\n"


def _rebalancing(numbers: Numbers, _studies: Sequence[Study]) -> Iterator[str]:
    shown = [(key, called) for key, called in REBALANCED if has(numbers, f"rebalancing-{key}")]
    if not shown:
        return
    yield (
        "### DualMap, Figure 13: rebalancing\n\nStands for Figure 13: what moving requests that wait adds to DualMap where "
        "load is fresh, where it is old, where an instance is slow, and where two prefixes are hot. Share on time, and "
        "how many of 1,000 requests moved.\n"
    )
    yield _image("fig13-rebalancing.png", "Effective capacity with each kind of rebalancing") + "\n"
    head = ["policy, rebalancing", *(called for _, called in shown)]
    rows = []
    for row in numbers.studies[f"rebalancing-{shown[0][0]}"].rows():
        found = [numbers.studies[f"rebalancing-{key}"].points for key, _ in shown]
        points = [next(point for point in group if point.row == row) for group in found]
        rows.append([code(row), *(f"{p.mean:.3f}, {metric(p, 'migrations') or '0'} moved" for p in points)])
    yield table(head, rows) + "\n"


# --- The other papers ---


def _eviction(numbers: Numbers, _studies: Sequence[Study]) -> Iterator[str]:
    if any(key.startswith("eviction-") for key in numbers.studies):
        yield (
            "### Randomization Boosts KV Caching, Tables 2 and 3\n\nLRU against RLT, and LBGR against cache-aware routing, "
            "in random and in round-robin order, on caches a little too small for what is in use (120k tokens) and nearly "
            "large enough (180k). Numbers: [below](#eviction-and-learned-routing-groups-in-random-order-caches-of-120k-tokens).\n"
        )
        yield _image("rlt-lbgr.png", "Hit rate and TTFT P90 by routing, eviction and order") + "\n"


def _fairness(numbers: Numbers, _studies: Sequence[Study]) -> Iterator[str]:
    if any(key.startswith("fairness-") for key in numbers.studies):
        yield (
            "### Locality-aware Fair Scheduling\n\nJain's index over the clients' service, each against its fair share, and "
            "all service delivered, with one misbehaving client among eight, at the higher rate.\n"
        )
        yield _image("fairness.png", "Jain's index and service by policies and workload") + "\n"


def _lengths(numbers: Numbers, studies: Sequence[Study]) -> Iterator[str]:
    yield from _of_placement(
        numbers,
        studies,
        "Who pays, by prompt length",
        "Not a figure of a paper: attainment of each tenth of the requests by prompt length. Read it before any share.",
        "prompt-lengths",
        ("worst_length",),
    )


SECTIONS: Sequence[Callable[[Numbers, Sequence[Study]], Iterator[str]]] = (
    _pareto,
    _capacity,
    _latency,
    _pending,
    _elasticity,
    _rebalancing,
    _eviction,
    _fairness,
    _lengths,
)


def _image(file: str, words: str) -> str:
    return f"![{words}]({PICTURES}/{file})"


# --- Bars ---

BAR_LABELS = {
    "fig13-rebalancing.png": "for DualMap, Figure 13",
    "rlt-lbgr.png": "Randomization Boosts KV Caching, Tables 2 and 3",
    "fairness.png": "Locality-aware Fair Scheduling",
}


def _bar_charts(numbers: Numbers) -> dict[str, list[Telling]]:
    """Panels by file."""
    charts: dict[str, list[Telling]] = {}
    rebalanced: dict[str, dict[str, float]] = {}
    for key, called in REBALANCED:
        if has(numbers, f"rebalancing-{key}"):
            rebalanced[called] = {point.row: point.mean for point in numbers.studies[f"rebalancing-{key}"].points}
    if rebalanced:
        charts["fig13-rebalancing.png"] = [
            ("What rebalancing adds to DualMap", "requests within the objective", rebalanced, False)
        ]
    eviction = {key: study for key, study in numbers.studies.items() if key.startswith("eviction-")}
    if eviction:
        charts["rlt-lbgr.png"] = [
            ("Hit rate", "share of prompt tokens", _by_row(numbers, eviction, "hit_rate"), False),
            ("Time to first token, P90", "seconds, logarithmic", _by_row(numbers, eviction, "ttft_p90_s"), True),
        ]
    fairness = {key: study for key, study in numbers.studies.items() if key.startswith("fairness-")}
    if fairness:
        charts["fairness.png"] = [
            ("Jain's index", "1: everyone got what was due", _by_row(numbers, fairness, "jain", last=True), False),
            (
                "Service delivered",
                "weighted tokens a second",
                _by_row(numbers, fairness, "service_per_s", last=True),
                False,
            ),
        ]
    return charts


def _by_row(
    numbers: Numbers, keys: Mapping[str, object], name: Metric, *, last: bool = False
) -> dict[str, dict[str, float]]:
    """One metric of several studies at their middle or last rate."""
    found = {}
    for key in keys:
        study = numbers.studies[key]
        rate = study.rates()[-1 if last else len(study.rates()) // 2]
        called = key.partition("-")[2].replace("-", " ")
        found[called] = {row: study.point(row, rate).metrics.get(name, 0.0) for row in study.rows()}
    return found
