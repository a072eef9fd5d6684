"""What a hit-rate ladder says: where most cached tokens are lost, why, and what helps. A gap is what one rung has less
than the one above it; a rung below what engines delivered lost nothing, so the gaps add up to all that was lost."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from pointsman.analysis.ladder_figures import RUNGS, Rung, Tally

LITTLE = 0.02
"""Share of prompt tokens below which a loss is not worth anybody's time."""


class Loss(StrEnum):
    """The cause of a gap, named after what is missing."""

    CAPACITY = "capacity"
    SPREAD = "spread"
    STALE = "a stale index"
    """In place of SPREAD if the index believed more than any engine held."""
    INDEX = "index"
    CHOICE = "choice"
    DELIVERY = "delivery"
    NOTHING = "nothing"
    UNKNOWN = "unknown"
    """No finished request whose engine told its cached tokens."""


BELOW = {
    Rung.CAPACITY: Loss.CAPACITY,
    Rung.PERFECT: Loss.SPREAD,
    Rung.KNOWN: Loss.INDEX,
    Rung.CHOSEN: Loss.CHOICE,
    Rung.DELIVERED: Loss.DELIVERY,
}
WHY = {
    Loss.CAPACITY: "the fleet's KV caches are too small for the prefixes that come back",
    Loss.SPREAD: "no single engine held what one cache of the whole fleet would have held",
    Loss.STALE: "engines lost blocks that the index still counted",
    Loss.INDEX: "an engine held it, and the index did not know",
    Loss.CHOICE: "another engine was known to hold more than the chosen one",
    Loss.DELIVERY: "it was expected at the chosen engine and was not there",
}
ADVICE = {  # {log} and {fleet}: of AdvisedOptions
    Loss.CAPACITY: "More KV cache: more engines, more memory for it or a smaller type of it, or offloading. `pointsman "
    "what-if{log} --instances N` shows what engines gain.",
    Loss.SPREAD: "Engines hold the same prefixes several times, or some are fuller than others. Compare policies that keep "
    "a prefix on few engines with `pointsman what-if{log} --policy NAME`.",
    Loss.STALE: "`pointsman doctor{log}` names the engines whose caches lost blocks without an event.",
    Loss.INDEX: "Cache events come late or are lost. `pointsman fleet{fleet}` shows how well each cache is known, "
    "`pointsman doctor{log}` why.",
    Loss.CHOICE: "The policy gave up the hit for a shorter queue, or does not look for hits. "
    "`pointsman what-if{log} --policy NAME` shows the price; more engines shorten queues.",
    Loss.DELIVERY: "It was evicted while the request waited, or the index is wrong about an engine. "
    "`pointsman doctor{log}` names the engines, `pointsman explain{log}` the story of one request.",
}


class AdvisedOptions(NamedTuple):
    """What advised commands need to read the same log, and to ask the same fleet; with a leading space."""

    log: str = ""
    fleet: str = ""


NO_OPTIONS = AdvisedOptions()


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """`share`: of all prompt tokens, cached on the rung above and not on `rung`."""

    rung: Rung
    cause: Loss
    share: float
    why: str
    advice: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    cause: Loss
    sentence: str
    gaps: list[Gap]
    """In the order of rungs; none without requests."""
    note: str = ""
    """What makes the rungs less sure, or empty."""


def verdict(tally: Tally, options: AdvisedOptions = NO_OPTIONS) -> Verdict:
    if not tally.prompt_tokens:
        return Verdict(
            cause=Loss.UNKNOWN, sentence="no finished request tells how much of its prompt was cached", gaps=[]
        )
    gaps = gaps_of(tally, options)
    possible, delivered = tally.share(Rung.UNBOUNDED), tally.share(Rung.DELIVERED)
    lost = possible - delivered
    worst = max(gaps, key=lambda gap: gap.share)
    if lost < LITTLE:
        cause = Loss.NOTHING
        sentence = f"nothing worth having is lost: {delivered:.1%} of prompt tokens were cached, {possible:.1%} had been sent before"
    else:
        cause = worst.cause
        sentence = (
            f"most is lost by {cause}: {_points(worst.share)} of {_points(lost)} points; {worst.why} "
            f"({delivered:.1%} of prompt tokens were cached, {possible:.1%} had been sent before)"
        )
    return Verdict(cause=cause, sentence=sentence, gaps=gaps, note=_note(tally, options))


def gaps_of(tally: Tally, options: AdvisedOptions = NO_OPTIONS) -> list[Gap]:
    delivered = tally.share(Rung.DELIVERED)
    above, gaps = tally.share(Rung.UNBOUNDED), []
    for rung in RUNGS[1:]:
        here = max(delivered, min(above, tally.share(rung)))
        cause = Loss.STALE if rung is Rung.PERFECT and _phantom(tally) >= LITTLE else BELOW[rung]
        advice = ADVICE[cause].format(**options._asdict())
        gaps.append(Gap(rung=rung, cause=cause, share=above - here, why=WHY[cause], advice=advice))
        above = here
    return gaps


def _phantom(tally: Tally) -> float:
    """Share that the index believed and no engine held."""
    return tally.share(Rung.KNOWN) - tally.share(Rung.PERFECT)


def _note(tally: Tally, options: AdvisedOptions) -> str:
    phantom = _phantom(tally)
    if phantom < LITTLE:
        return ""
    return f"the index believed {_points(phantom)} points that no engine held: `pointsman doctor{options.log}` names the engines"


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def untold_note(tally: Tally) -> str:
    """Empty if all finished requests count."""
    if not tally.untold:
        return ""
    return (
        f"{tally.untold:,} finished requests count nowhere: their engines told no cached tokens, or only the sum for several "
        "answers or prompts"
    )


def loaded_note(tally: Tally) -> str:
    """Empty if nothing was loaded back."""
    if not tally.loaded_tokens:
        return ""
    return (
        f"{tally.loaded_tokens / tally.prompt_tokens:.1%} of the prompt tokens, {tally.loaded_tokens / tally.tokens[-1]:.0%} of "
        "what was delivered, were loaded back from slower tiers"
    )
