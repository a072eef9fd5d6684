"""The page of shadow policies, of their summary: one verdict for each, what it would have changed, and where it differs."""

from typing import NamedTuple

from markupsafe import Markup

from pointsman.analysis.shadow import ShadowReport, ShadowSummary
from pointsman.analysis.shadow_figures import DecisionFigures, ShadowDecision
from pointsman.analysis.shadow_windows import ShadowFigures, WindowResult
from pointsman_cli.console.pages.cells import NOTHING, Level, clock, duration, share
from pointsman_cli.console.pages.health import Verdict
from pointsman_cli.console.views import ShadowsView
from pointsman_cli.formatting import plural
from pointsman_cli.terminal import wall_time

WINDOWS_SHOWN = 12
DIFFERENCES_SHOWN = 20
NOTICED_SECONDS = 0.001
NOTICED_SHARE = 0.001
"""Differences below these are called none."""


class Change(NamedTuple):
    """`better` None: neither."""

    label: str
    shown: Markup
    beside: Markup
    better: bool | None


class Shadowed(NamedTuple):
    report: ShadowReport
    settings: str
    changes: list[Change]
    windows: list[tuple[WindowResult, ShadowFigures, Markup, Markup]]
    """With the begin and the end of each."""
    problem: str
    differences: list[tuple[Markup, ShadowDecision]]


def verdict(view: ShadowsView) -> Verdict:
    if view.summary is None:
        return Verdict("note", "No other policy decides along.", [], "Off")
    said = [_sentence(report) for report in view.summary.shadows]
    level: Level = "ok" if any(report.total.decided for report in view.summary.shadows) else "note"
    return Verdict(level, said[0] if said else "No other policy decides along.", said[1:], "Shadow")


def _sentence(report: ShadowReport) -> str:
    total = report.total
    if report.problem:
        return f"Policy {report.name} cannot decide: {report.problem}."
    if not total.decided or total.agreement is None:
        return f"Policy {report.name} has not decided a placement yet."
    differs = f"Policy {report.name} differs in {1 - total.agreement:.1%} of {plural(total.decided, 'placement')}"
    effects = []
    if total.regret_seconds is not None and abs(total.regret_seconds) > NOTICED_SECONDS:
        word = "sooner" if total.regret_seconds > 0 else "later"
        effects.append(f"predicts the first token {abs(total.regret_seconds) * 1000:.0f} ms {word}")
    if total.hit_rate_gain is not None and abs(total.hit_rate_gain) > NOTICED_SHARE:
        word = "more" if total.hit_rate_gain > 0 else "fewer"
        effects.append(f"finds {abs(total.hit_rate_gain) * 100:.1f} points {word} of the prompts cached")
    return f"{differs}; it {' and '.join(effects)}." if effects else f"{differs}, with no difference in TTFT or hits."


def shadowed(summary: ShadowSummary | None, speed: float) -> list[Shadowed]:
    return [_shadowed(report, summary.windows, speed) for report in summary.shadows] if summary is not None else []


def _shadowed(report: ShadowReport, windows: list[WindowResult], speed: float) -> Shadowed:
    problems = [window.problems[report.name] for window in windows if report.name in window.problems]
    return Shadowed(
        report=report,
        settings=", ".join(f"{name}={value}" for name, value in sorted(report.settings.items()) if value != ""),
        changes=_changes(report.total),
        windows=[
            (window, window.shadows[report.name], _clock(window.since, speed), _clock(window.until, speed))
            for window in windows[::-1]
            if report.name in window.shadows
        ][:WINDOWS_SHOWN],
        problem=report.problem or report.failure or (problems[-1] if problems else ""),
        differences=[(_clock(one.at, speed), one) for one in report.differences[: -DIFFERENCES_SHOWN - 1 : -1]],
    )


def _clock(at: float, speed: float) -> Markup:
    return clock(wall_time(at, speed).timestamp())


def _changes(total: DecisionFigures) -> list[Change]:
    regret, gain, placed = total.regret_seconds, total.hit_rate_gain, max(1, total.placed)
    tokens = max(1, total.prompt_tokens)
    ours, theirs = total.running_predicted_ttft / placed, total.shadow_predicted_ttft / placed
    hits = total.running_cached_tokens / tokens, total.shadow_cached_tokens / tokens

    def now(shown: Markup) -> Markup:
        return Markup(f"now {shown}")

    return [
        Change("Same engine", share(total.agreement, 1), Markup(f"of {total.decided:,}"), None),
        Change("Predicted TTFT", duration(theirs), now(duration(ours)), _better(regret, NOTICED_SECONDS))
        if regret is not None
        else Change("Predicted TTFT", NOTHING, Markup(""), None),
        Change("Predicted hits", share(hits[1], 1), now(share(hits[0], 1)), _better(gain, NOTICED_SHARE))
        if gain is not None
        else Change("Predicted hits", NOTHING, Markup(""), None),
        Change("It alone rejects", Markup(f"{total.shadow_rejects:,}"), Markup(""), None),
        Change("It alone admits", Markup(f"{total.shadow_places:,}"), Markup(""), None),
    ]


def _better(gained: float, noticed: float) -> bool | None:
    return gained > 0 if abs(gained) > noticed else None
