"""A story as people read it: how it ended, why, where the time went, and then each decision with its numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman_cli.explain.diagnosis import headline, reasons, seconds
from pointsman_cli.explain.lookup import Slow
from pointsman_cli.explain.timeline import (
    NOT_KNOWN,
    DecisionRecord,
    GrantRecord,
    MoveRefused,
    Phase,
    QueuedAhead,
    RequestTimeline,
    WeighedCandidate,
    blocks_of,
)
from pointsman_cli.tap.event_lines import line
from pointsman_cli.terminal import wall_time

BAR_CHARS = 56
AHEAD_SHOWN = 8
REFUSED_SHOWN = 8
BAR_STYLES = {"gone": "dim", "way": "dim", "queue": "yellow", "engine": "cyan", "decoding": "green"}
ENDED_WELL = "bold green"
ENDED_LATE = "bold red"


def show_story(console: Console, story: RequestTimeline) -> None:
    """All of it, from the verdict to the single events."""
    _show_head(console, story)
    told = reasons(story)
    if told:
        console.print("\nwhy", style="bold")
        for sentence in told:
            console.print(f"  - {sentence}", markup=False, soft_wrap=True)
    _show_time(console, story.phases)
    _show_predictions(console, story)
    for decision in story.decisions:
        _show_decision(console, decision)
        for grant in story.grants:
            if grant.attempt == decision.attempt and grant.instance == decision.instance:
                _show_grant(console, grant, told=decision.ahead)
    _show_refused(console, story.refused)
    _show_events(console, story)


def show_slowest(console: Console, slowest: Sequence[Slow], speed: float) -> None:
    """A row for each request, and what to type next."""
    table = Table(box=box.SIMPLE_HEAD)
    for column, justify in (
        ("request", "left"), ("arrived", "left"), ("instance", "left"), ("tenant", "left"), ("TTFT", "right"),
        ("objective", "right"), ("before the grant", "right"), ("after it", "right"), ("prompt", "right"), ("cached", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for slow in slowest:
        queued = slow.queued_seconds
        table.add_row(
            slow.request,
            f"{wall_time(slow.arrived_at, speed):%H:%M:%S}",
            slow.instance,
            slow.tenant or "-",
            Text(seconds(slow.ttft), style=ENDED_LATE if slow.late_seconds > 0 else ""),
            seconds(slow.slo_ttft),
            "-" if queued is None else seconds(queued),
            "-" if queued is None else seconds(slow.ttft - queued),
            f"{slow.prompt_tokens:,}",
            f"{slow.cached_tokens:,}" if slow.cached_tokens >= 0 else "-",
        )
    console.print(table)
    console.print(f"for the story of one: pointsman explain {slowest[0].request}", markup=False, soft_wrap=True)


def story_as_json(story: RequestTimeline) -> dict[str, Any]:
    """Everything that is shown, and every number unrounded."""
    return {
        "request": story.request,
        "arrived_at": story.arrived_at,
        "wall_time": wall_time(story.arrived_at, story.speed).isoformat(timespec="milliseconds"),
        "headline": headline(story),
        "why": reasons(story),
        "arrival": _arrival_as_json(story.arrival),
        "ttft": story.ttft,
        "phases": msgspec.to_builtins(story.phases),
        "decisions": msgspec.to_builtins(story.decisions),
        "failed_attempts": msgspec.to_builtins(story.failed),
        "refused_moves": msgspec.to_builtins(story.refused),
        "grants": msgspec.to_builtins(story.grants),
        "meanwhile": msgspec.to_builtins(story.meanwhile),
        "end": msgspec.to_builtins(story.end),
        "events": [{"sequence": entry.sequence, "event": msgspec.to_builtins(entry.event)} for entry in story.entries],
    }


def _arrival_as_json(arrival: RequestArrived | None) -> dict[str, Any] | None:
    if arrival is None:
        return None
    told: dict[str, Any] = msgspec.to_builtins(arrival)
    return {name: value for name, value in told.items() if name != "keys"} | {"blocks": blocks_of(arrival)}


def _show_head(console: Console, story: RequestTimeline) -> None:
    arrival = story.arrival
    console.print(f"request {story.request}", style="bold", markup=False, soft_wrap=True)
    when = wall_time(story.arrived_at, story.speed).isoformat(sep=" ", timespec="milliseconds")
    if story.arrived_before_the_log:
        console.print(
            f"about {when}; it arrived before entry {story.log_begins:,}, with which the log begins", markup=False
        )
    elif arrival is None:
        console.print(f"about {when}; the log has no arrival of it: no scheduler took it in", markup=False)
    else:
        session = f", session {arrival.session}" if arrival.session else ""
        streamed = "streamed" if arrival.streaming else "not streamed"
        console.print(
            f"{when}, through {arrival.ingress}, of {arrival.tenant or 'nobody named'}{session}", markup=False
        )
        console.print(
            f"{arrival.prompt_tokens:,} prompt tokens in {blocks_of(arrival)} blocks of {story.block_tokens}, up to "
            f"{arrival.max_output_tokens:,} tokens out, {streamed}; first token wanted within {seconds(arrival.slo_ttft)}"
        )
    late = arrival is not None and story.ttft is not None and story.ttft > arrival.slo_ttft
    well = isinstance(story.end, RequestFinished) and not late
    console.print(headline(story), style=ENDED_WELL if well else ENDED_LATE, markup=False, soft_wrap=True)


def _show_time(console: Console, phases: Sequence[Phase]) -> None:
    if not phases:
        return
    whole = max(phase.since_seconds + phase.seconds for phase in phases) or 1.0
    console.print("\nwhere the time went", style="bold")
    width = max(len(phase.name) for phase in phases)
    for phase in phases:
        text = Text(f"  {phase.name:<{width}}  {seconds(phase.seconds):>9}  ")
        begin = round(BAR_CHARS * phase.since_seconds / whole)
        length = max(1, round(BAR_CHARS * (phase.since_seconds + phase.seconds) / whole) - begin)
        text.append(" " * min(begin, BAR_CHARS - 1))
        text.append("█" * length, style=BAR_STYLES[phase.kind])
        console.print(text, soft_wrap=True)


def _show_predictions(console: Console, story: RequestTimeline) -> None:
    decision, end = story.placement, story.end
    if decision is None or decision.predicted_ttft is None:
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("predicted", "real"):
        table.add_column(column, justify="right")
    real = end.cached_tokens if isinstance(end, RequestFinished) else -1
    table.add_row("cached tokens", f"{decision.predicted_cached_tokens:,}", f"{real:,}" if real >= 0 else "-")
    what = "TTFT" if story.arrival is None or story.arrival.streaming else "TTFT (real: the whole answer)"
    table.add_row(what, seconds(decision.predicted_ttft), "-" if story.ttft is None else seconds(story.ttft))
    console.print(table)


def _show_decision(console: Console, decision: DecisionRecord) -> None:
    console.print(
        f"{decision.kind} {seconds(decision.after_seconds)} after its arrival: entry {decision.sequence:,}, decision "
        f"{decision.number:,} of term {decision.term}, from what was known as of entry {decision.as_of:,}"
        + (f" ({decision.unseen_entries} entries behind)" if decision.unseen_entries else ""),
        style="bold",
        soft_wrap=True,
    )
    if decision.candidates:
        console.print(_candidates(decision))
    chosen = "nowhere" if decision.kind == "rejected" else f"{decision.instance}"
    by = f" by {decision.policy}" if decision.policy else ""
    console.print(f"  {chosen}{by}: {decision.reason}", markup=False, soft_wrap=True)
    console.print(f"  {_admission(decision)}", markup=False, soft_wrap=True)
    if decision.excluded:
        console.print(f"  not to be tried again: {', '.join(decision.excluded)}", markup=False)
    _show_ahead(console, f"before it on {decision.instance}", decision.ahead)


def _admission(decision: DecisionRecord) -> str:
    name = decision.settings.get("admission", "")
    left = f"{seconds(decision.budget_seconds)} of its objective left"
    if decision.kind == "rejected":
        again = f", asked to come back in {seconds(decision.retry_after)}" if decision.retry_after else ""
        return f"admission {name}: {decision.detail}; {left}{again}"
    if decision.kind == "moved":
        return f"{left}; what was admitted once is not asked again"
    assert decision.predicted_ttft is not None
    predicted = decision.predicted_ttft - decision.after_seconds
    verdict = "in time" if predicted <= decision.budget_seconds else "too late"
    return f"admission {name} let it in: predicted {seconds(predicted)}, with {left}: {verdict}"


def _candidates(decision: DecisionRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "instance", "status", "cache known"):
        table.add_column(column, no_wrap=True)
    for column in ("hit blocks", "promised", "to compute", "queue", "prefill", "TTFT", "pending", "in prefill", "decoding", "pace"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for weighed in decision.candidates:
        table.add_row(*_candidate(weighed), style="bold" if weighed.chosen else "" if weighed.weighed else "dim")
    return table


def _candidate(weighed: WeighedCandidate) -> Iterable[str]:
    known = weighed.status != NOT_KNOWN
    return (
        "->" if weighed.chosen else "" if weighed.weighed else "not weighed",
        weighed.instance,
        weighed.status,
        weighed.knowledge,
        f"{weighed.hit_blocks:,}",
        f"{weighed.hit_blocks - weighed.held_blocks:,}" if known else "?",
        f"{weighed.uncached_tokens:,}",
        seconds(weighed.queue_seconds),
        seconds(weighed.prefill_seconds),
        seconds(weighed.predicted_ttft),
        *((str(weighed.pending), str(weighed.in_prefill), str(weighed.decoding)) if known else "???"),
        f"x{weighed.correction:.2f}" if known else "?",
    )


def _show_grant(console: Console, grant: GrantRecord, *, told: Sequence[QueuedAhead]) -> None:
    """`told`: who was before it when it was placed."""
    by = "granted" if grant.by_leader else "sent by its ingress, without a scheduler,"
    console.print(
        f"{by} {seconds(grant.after_seconds)} after its arrival to {grant.instance}: entry {grant.sequence:,}",
        style="bold",
        soft_wrap=True,
    )
    console.print(
        f"  {grant.work_tokens:,} tokens to compute inside before its first token, {seconds(grant.work_seconds)} by the "
        "cost model"
        + (
            f", x{grant.correction:.2f} by experience; {grant.decoding} decoding beside it"
            if grant.instance_known
            else ""
        ),
        soft_wrap=True,
    )
    if grant.overtaken_by:
        console.print(f"  {len(grant.overtaken_by)} that came later were granted before it", style="yellow")
    if grant.in_engine != told:
        _show_ahead(console, f"before it in {grant.instance}", grant.in_engine)


def _show_ahead(console: Console, what: str, ahead: Sequence[QueuedAhead]) -> None:
    if not ahead:
        return
    console.print(
        f"  {what}: {len(ahead)}, {sum(one.uncached_tokens for one in ahead):,} tokens to compute", markup=False
    )
    for one in ahead[:AHEAD_SHOWN]:
        console.print(
            f"    {one.request}  {one.stage}, {one.uncached_tokens:,} tokens, {seconds(one.prefill_seconds)} of prefill, "
            f"there for {seconds(one.waited_seconds)}",
            markup=False,
            soft_wrap=True,
        )
    if len(ahead) > AHEAD_SHOWN:
        console.print(f"    and {len(ahead) - AHEAD_SHOWN} more")


def _show_refused(console: Console, refused: Sequence[MoveRefused]) -> None:
    """Moves that were not made, the newest of many."""
    if not refused:
        return
    console.print("\nmoves that were refused", style="bold")
    if len(refused) > REFUSED_SHOWN:
        console.print(f"  {len(refused) - REFUSED_SHOWN} before these")
    for move in refused[-REFUSED_SHOWN:]:
        how = "out of the engine of" if move.rebind else "from"
        console.print(
            f"  {seconds(move.after_seconds)} after its arrival, {how} {move.source} to {move.instance}: {move.reason}, "
            f"{move.detail}",
            markup=False,
            soft_wrap=True,
        )
        console.print(
            f"    {move.policy} had asked for it: {seconds(move.benefit_seconds)} sooner by what it knew as of entry "
            f"{move.planned_as_of:,} (plan {move.plan}); refused in entry {move.sequence:,}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


def _show_events(console: Console, story: RequestTimeline) -> None:
    console.print("\nits entries in the log", style="bold")
    for entry in story.entries:
        text = line(entry, speed=story.speed)
        if entry.sequence in story.fenced:
            text.append("  (of a deposed leader: nobody applied it)", style="yellow")
        text.no_wrap = False
        console.print(text, soft_wrap=True)
