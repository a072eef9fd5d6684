"""A request's timeline as text and JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from pointsman.contracts.requests import RequestArrived, RequestFinished, cached_of_keys
from pointsman_cli.explain.candidates import as_listed, listed, others
from pointsman_cli.explain.diagnosis import headline, reasons_and_details, verdict
from pointsman_cli.explain.lookup import Slow
from pointsman_cli.explain.values import (
    NOT_KNOWN,
    DecisionRecord,
    GrantRecord,
    Phase,
    QueuedAhead,
    RequestTimeline,
    WeighedCandidate,
    blocks_of,
)
from pointsman_cli.formatting import output_bound, seconds
from pointsman_cli.options import as_given
from pointsman_cli.tap.event_lines import line
from pointsman_cli.terminal import heading, say, table, wall_time

BAR_CHARS = 56
AHEAD_SHOWN = 8
REFUSED_SHOWN = 8
BAR_STYLES = {
    "gone": "dim",
    "way": "dim",
    "queue": "yellow",
    "engine": "cyan",
    "transfer": "magenta",
    "decoding": "green",
}
SLOWEST_COLUMNS = (
    "request", "arrived", "instance", "tenant", "end", ">waited", ">objective", ">before the grant", ">after it", ">prompt",
    ">cached",
)  # fmt: skip
CANDIDATE_COLUMNS = (
    "", "instance", "status", "cache known", ">hit blocks", ">promised", ">to compute", ">queue", ">prefill", ">TTFT",
    ">pending", ">in prefill", ">decoding", ">pace",
)  # fmt: skip
ENDED_WELL = "bold green"
ENDED_LATE = "bold red"


def show_timeline(console: Console, timeline: RequestTimeline, *, everything: bool) -> None:
    """The verdict and the sentences behind it; with `everything` also what else is known."""
    _show_head(console, timeline)
    reasons, details = reasons_and_details(timeline)
    for title, sentences in (("why", reasons), ("also", details if everything else [])):
        if sentences:
            heading(console, title)
        for sentence in sentences:
            say(console, f"  - {sentence}")
    _show_time(console, timeline.phases)
    if not everything:
        say(console, "")
        say(
            console,
            f"candidates, predictions and log entries: pointsman explain{as_given()} {timeline.request} --all",
            "dim",
        )
        return
    _show_predictions(console, timeline)
    for decision in timeline.decisions:
        _show_decision(console, decision)
        for grant in timeline.grants:
            if grant.attempt == decision.attempt and grant.instance == decision.instance:
                _show_grant(console, grant, ahead=decision.ahead)
    _show_refused(console, timeline)
    _show_events(console, timeline)


def show_slowest(console: Console, slowest: Sequence[Slow], speed: float) -> None:
    rows = table(*SLOWEST_COLUMNS)
    for slow in slowest:
        queued = slow.queued_seconds
        rows.add_row(
            slow.request,
            f"{wall_time(slow.arrived_at, speed):%Y-%m-%d %H:%M:%S}",
            slow.instance,
            slow.tenant or "-",
            type(slow.end).__name__.removeprefix("Request").lower(),
            Text(seconds(slow.waited), style=ENDED_LATE if slow.is_late else ""),
            "-" if slow.slo_ttft is None else seconds(slow.slo_ttft),
            "-" if queued is None else seconds(queued),
            "-" if queued is None else seconds(slow.waited - queued),
            f"{slow.prompt_tokens:,}" if slow.prompt_tokens >= 0 else "-",
            f"{slow.cached_tokens:,}" if slow.cached_tokens >= 0 else "-",
        )
    console.print(rows)
    say(console, f"for the timeline of one: pointsman explain{as_given()} {slowest[0].request}")


def timeline_as_json(timeline: RequestTimeline) -> dict[str, Any]:
    found, (reasons, details) = verdict(timeline), reasons_and_details(timeline)
    return {
        "request": timeline.request,
        "arrived_at": timeline.arrived_at,
        "wall_time": wall_time(timeline.arrived_at, timeline.speed).isoformat(timespec="milliseconds"),
        "headline": headline(timeline),
        "verdict": {"cause": found.cause, "sentence": found.sentence},
        "why": reasons,
        "also": details,
        "arrival": _arrival_as_json(timeline.arrival),
        "ttft": timeline.ttft,
        "phases": msgspec.to_builtins(timeline.phases),
        "decisions": [msgspec.to_builtins(as_listed(decision)) for decision in timeline.decisions],
        "failed_attempts": msgspec.to_builtins(timeline.failed),
        "refused_moves": [{"sequence": entry} | msgspec.to_builtins(event) for entry, event in timeline.refused],
        "grants": msgspec.to_builtins(timeline.grants),
        "meanwhile": msgspec.to_builtins(timeline.meanwhile),
        "end": msgspec.to_builtins(timeline.end),
        "events": [
            {"sequence": entry.sequence, "event": msgspec.to_builtins(entry.event)} for entry in timeline.entries
        ],
    }


def _arrival_as_json(arrival: RequestArrived | None) -> dict[str, Any] | None:
    if arrival is None:
        return None
    fields: dict[str, Any] = msgspec.to_builtins(arrival)
    return {name: value for name, value in fields.items() if name != "keys"} | {"blocks": blocks_of(arrival)}


def _show_head(console: Console, timeline: RequestTimeline) -> None:
    arrival = timeline.arrival
    late = arrival is not None and timeline.ttft is not None and timeline.ttft > arrival.slo_ttft
    well = isinstance(timeline.end, RequestFinished) and not late
    say(console, verdict(timeline).sentence, ENDED_WELL if well else ENDED_LATE)
    say(console, f"request {timeline.request}", "bold")
    when = wall_time(timeline.arrived_at, timeline.speed).isoformat(sep=" ", timespec="milliseconds")
    if timeline.arrived_before_the_log:
        say(console, f"about {when}; it arrived before entry {timeline.log_begins:,}, with which the log begins")
    elif arrival is None:
        say(console, f"about {when}; the log has no arrival of it: no scheduler accepted it")
    else:
        session = f", session {arrival.session}" if arrival.session else ""
        streamed = "streamed" if arrival.streaming else "not streamed"
        say(console, f"{when}, through {arrival.ingress}, of {arrival.tenant or 'no named tenant'}{session}")
        say(
            console,
            f"{arrival.prompt_tokens:,} prompt tokens in {blocks_of(arrival)} blocks of {timeline.block_tokens}, "
            f"{output_bound(arrival.max_output_tokens)} tokens out, {streamed}; first token wanted within {seconds(arrival.slo_ttft)}",
        )
    say(console, headline(timeline))


def _show_time(console: Console, phases: Sequence[Phase]) -> None:
    if not phases:
        return
    whole = max(phase.since_seconds + phase.seconds for phase in phases) or 1.0
    heading(console, "where the time went")
    width = max(len(phase.name) for phase in phases)
    for phase in phases:
        text = Text(f"  {phase.name:<{width}}  {seconds(phase.seconds):>9}  ")
        begin = round(BAR_CHARS * phase.since_seconds / whole)
        length = max(1, round(BAR_CHARS * (phase.since_seconds + phase.seconds) / whole) - begin)
        text.append(" " * min(begin, BAR_CHARS - 1))
        text.append("█" * length, style=BAR_STYLES[phase.kind])
        console.print(text, soft_wrap=True)


def _show_predictions(console: Console, timeline: RequestTimeline) -> None:
    decision, end = timeline.placement, timeline.end
    if decision is None or decision.predicted_ttft is None:
        return
    rows = table("", ">predicted", ">real")
    real = cached_of_keys(end, timeline.answers) if isinstance(end, RequestFinished) else -1
    rows.add_row("cached tokens", f"{decision.predicted_cached_tokens:,}", f"{real:,}" if real >= 0 else "-")
    what = "TTFT" if timeline.arrival is None or timeline.arrival.streaming else "TTFT (real: the whole answer)"
    upper = decision.predicted_ttft_upper
    predicted = seconds(decision.predicted_ttft) + (f", 9 of 10 within {seconds(upper)}" if upper is not None else "")
    rows.add_row(what, predicted, "-" if timeline.ttft is None else seconds(timeline.ttft))
    console.print(rows)


def _show_decision(console: Console, decision: DecisionRecord) -> None:
    say(
        console,
        f"{decision.kind} {seconds(decision.after_seconds)} after its arrival: entry {decision.sequence:,}, decision "
        f"{decision.number:,} of term {decision.term}, from what was known as of entry {decision.as_of:,}"
        + (f" ({decision.unseen_entries} entries behind)" if decision.unseen_entries else ""),
        "bold",
    )
    if decision.candidates:
        rows = table(*CANDIDATE_COLUMNS)
        for weighed in listed(decision):
            rows.add_row(*_candidate(weighed), style="bold" if weighed.chosen else "" if weighed.weighed else "dim")
        console.print(rows)
        for rest in others(decision):
            say(console, f"  {rest.sentence}")
    chosen = "nowhere" if decision.kind == "rejected" else f"{decision.instance}"
    by = f" by {decision.policy}" if decision.policy else ""
    say(console, f"  {chosen}{by}: {decision.reason}")
    say(console, f"  {_admission(decision)}")
    if decision.excluded:
        say(console, f"  not to be tried again: {', '.join(decision.excluded)}")
    _show_ahead(console, f"before it on {decision.ahead_at}", decision.ahead)


def _admission(decision: DecisionRecord) -> str:
    name = decision.settings.get("admission", "")
    left = f"{seconds(decision.budget_seconds)} of its objective left"
    if decision.kind == "rejected":
        again = f", asked to come back in {seconds(decision.retry_after)}" if decision.retry_after else ""
        return f"{f'admission {name}' if name else decision.policy}: {decision.detail}; {left}{again}"
    if decision.kind == "moved":
        return f"{left}; what was admitted once is not asked again"
    assert decision.predicted_ttft is not None
    predicted = decision.predicted_ttft - decision.after_seconds
    outcome = "in time" if predicted <= decision.budget_seconds else "too late"
    return f"admission {name} let it in: predicted {seconds(predicted)}, with {left}: {outcome}"


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


def _show_grant(console: Console, grant: GrantRecord, *, ahead: Sequence[QueuedAhead]) -> None:
    by = "granted" if grant.by_leader else "sent by its ingress, without a scheduler,"
    say(
        console,
        f"{by} {seconds(grant.after_seconds)} after its arrival to {grant.instance}: entry {grant.sequence:,}",
        "bold",
    )
    say(
        console,
        f"  {grant.work_tokens:,} tokens to compute inside before its first token, {seconds(grant.work_seconds)} by the "
        "cost model"
        + (
            f", x{grant.correction:.2f} by experience; {grant.decoding} decoding beside it"
            if grant.instance_known
            else ""
        ),
    )
    if grant.overtaken_by:
        say(console, f"  {len(grant.overtaken_by)} that came later were granted before it", "yellow")
    if grant.in_engine != ahead:
        _show_ahead(console, f"before it in {grant.instance}", grant.in_engine)


def _show_ahead(console: Console, what: str, ahead: Sequence[QueuedAhead]) -> None:
    if not ahead:
        return
    say(console, f"  {what}: {len(ahead)}, {sum(one.uncached_tokens for one in ahead):,} tokens to compute")
    for one in ahead[:AHEAD_SHOWN]:
        say(
            console,
            f"    {one.request}  {one.stage}, {one.uncached_tokens:,} tokens, {seconds(one.prefill_seconds)} of prefill, "
            f"there for {seconds(one.waited_seconds)}",
        )
    if len(ahead) > AHEAD_SHOWN:
        say(console, f"    and {len(ahead) - AHEAD_SHOWN} more")


def _show_refused(console: Console, timeline: RequestTimeline) -> None:
    refused = timeline.refused
    if not refused:
        return
    heading(console, "moves that were refused")
    if len(refused) > REFUSED_SHOWN:
        say(console, f"  {len(refused) - REFUSED_SHOWN} before these")
    for sequence, move in refused[-REFUSED_SHOWN:]:
        way = f"{'out of the engine of' if move.rebind else 'from'} {move.source} to {move.instance}"
        after = seconds(move.at - timeline.arrived_at)
        say(console, f"  {after} after its arrival, {way}: {move.reason}, {move.detail}")
        asked = f"{move.policy} had asked for it: {seconds(move.benefit)} sooner by what it knew as of entry"
        say(console, f"    {asked} {move.planned_as_of:,} (plan {move.plan}); refused in entry {sequence:,}", "dim")


def _show_events(console: Console, timeline: RequestTimeline) -> None:
    heading(console, "its entries in the log")
    for entry in timeline.entries:
        text = line(entry, speed=timeline.speed)
        if entry.sequence in timeline.fenced:
            text.append("  (of a deposed leader: without effect)", style="yellow")
        text.no_wrap = False
        console.print(text, soft_wrap=True)
