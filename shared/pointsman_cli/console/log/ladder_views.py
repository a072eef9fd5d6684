"""The hit-rate page: the ladder's shares for the pool, its tenants and hours."""

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_figures import RUNGS, Rung, Tally
from pointsman.analysis.ladder_verdict import verdict
from pointsman_cli.console.views import LadderGroupView, LadderView, RungView
from pointsman_cli.terminal import wall_time

TITLES = {
    Rung.UNBOUNDED: "an unbounded cache",
    Rung.CAPACITY: "one cache of the fleet's size",
    Rung.PERFECT: "the engine that held most",
    Rung.KNOWN: "the engine known to hold most",
    Rung.CHOSEN: "predicted at the chosen engine",
    Rung.DELIVERED: "delivered by engines",
}
TENANTS_SHOWN = 200


def ladder_view(ladder: HitRateLadder | None) -> LadderView:
    if ladder is None:
        return LadderView(pool=None, tenants=[], hours=[])
    figures, total = ladder.figures, ladder.figures.ever
    judged = verdict(total)
    note = f"{total.untold:,} finished requests told no cached tokens and count nowhere" if total.untold else ""
    gaps = {gap.rung: (gap.why, gap.advice) for gap in judged.gaps}
    return LadderView(
        pool=_group("pool", "", total, gaps) if total.prompt_tokens else None,
        tenants=[_group("tenant", name, tally, {}) for name, tally in figures.tenants()[:TENANTS_SHOWN]],
        hours=[_group("hour", f"{wall_time(begin, 1.0):%m-%d %H:%M}", tally, {}) for begin, tally in figures.hours()],
        verdict=judged.sentence,
        note="; ".join(text for text in (judged.note, note) if text),
    )


def _group(kind: str, name: str, tally: Tally, gaps: dict[Rung, tuple[str, str]]) -> LadderGroupView:
    rungs: list[RungView] = []
    above: float | None = None
    for rung, tokens in zip(RUNGS, tally.tokens, strict=True):
        share = round(tally.share(rung), 4) if tally.prompt_tokens else None
        why, advice = gaps.get(rung, ("", ""))
        rungs.append(
            RungView(
                rung=str(rung),
                title=TITLES[rung],
                tokens=tokens,
                share=share,
                lost=None if above is None or share is None else round(above - share, 4),
                why=why,
                advice=advice,
            )
        )
        above = share
    return LadderGroupView(
        kind=kind, name=name, requests=tally.requests, prompt_tokens=tally.prompt_tokens, rungs=rungs
    )
