"""The hit-rate page: the ladder's shares for the pool, its tenants and hours."""

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_figures import RUNGS, Rung, Tally
from pointsman.analysis.ladder_verdict import gaps_of, loaded_note, untold_note, verdict
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
    return LadderView(
        pool=_group("pool", "", total, explained=True) if total.prompt_tokens else None,
        tenants=[_group("tenant", name, tally) for name, tally in figures.tenants()[:TENANTS_SHOWN]],
        hours=[_group("hour", f"{wall_time(begin, 1.0):%m-%d %H:%M}", tally) for begin, tally in figures.hours()],
        verdict=judged.sentence,
        cause=judged.cause,
        note="; ".join(text for text in (judged.note, untold_note(total), loaded_note(total)) if text),
    )


def _group(kind: str, name: str, tally: Tally, *, explained: bool = False) -> LadderGroupView:
    gaps = {gap.rung: gap for gap in gaps_of(tally)}
    rungs: list[RungView] = []
    for rung, tokens in zip(RUNGS, tally.tokens, strict=True):
        gap = gaps.get(rung) if tally.prompt_tokens else None
        rungs.append(
            RungView(
                rung=str(rung),
                title=TITLES[rung],
                tokens=tokens,
                share=round(tally.share(rung), 4) if tally.prompt_tokens else None,
                lost=round(gap.share, 4) if gap else None,
                why=gap.why if gap and explained else "",
                advice=gap.advice if gap and explained else "",
            )
        )
    return LadderGroupView(
        kind=kind, name=name, requests=tally.requests, prompt_tokens=tally.prompt_tokens, rungs=rungs
    )
