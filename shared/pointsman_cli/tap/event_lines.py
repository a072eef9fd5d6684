"""Formats an event as one line of its main fields. Times are engine time, except the wall time in front."""

from collections.abc import Sequence
from typing import assert_never

from rich.text import Text

from pointsman.contracts import cache, decisions, fleet, requests
from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.cache import CacheEvent, Run, Tier
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.ports import LogEntry, LogReset
from pointsman_cli.formatting import output_bound, plural, seconds
from pointsman_cli.policy_changes import policies_set
from pointsman_cli.terminal import wall_time

REQUEST_CHARS = 12
STYLES: dict[type, str] = {
    decisions.RequestPlaced: "bold blue",
    decisions.RequestMigrated: "bold blue",
    requests.RequestFinished: "green",
    decisions.RequestRejected: "yellow",
    decisions.MigrationRefused: "yellow",
    requests.RequestCancelled: "yellow",
    requests.RequestAttemptFailed: "bold red",
    requests.RequestFailed: "bold red",
    cache.CacheGap: "bold red",
    decisions.WritesLost: "bold red",
    decisions.RequestsRefused: "bold red",
    fleet.InstanceSuspected: "bold red",
    fleet.InstanceEjected: "bold red",
    decisions.LeaderElected: "bold magenta",
}


def line(entry: LogEntry, *, speed: float) -> Text:
    event = entry.event
    text = Text(no_wrap=True)
    text.append(f"{wall_time(event.at, speed):%H:%M:%S.%f}"[:-3] if event else " " * 12, style="dim")
    text.append(f" {entry.sequence:>8}", style="dim")
    text.append(f"  {_short_subject(entry.subject):<21}")
    if event is None:
        return text.append(f"does not decode: {entry.problem}", style="bold red")
    text.append(f" {type(event).__name__:<17}", style=_style(event))
    return text.append(f" {details(event)}")


def reset_line(reset: LogReset) -> Text:
    return Text(f"--- the log starts again at {reset.first_sequence}: {reset.reason}", style="bold red")


def details(event: LogEvent) -> str:
    match event:
        case cache.CacheSnapshot():
            return f"{_runs(event.runs)}, seq {event.sequence}"
        case cache.BlocksStored():
            return f"{_runs(event.runs)}{_in(event.tier)}, seq {event.sequence}"
        case cache.BlocksRemoved():
            return f"{_blocks(event.keys)}{_in(event.tier)}{', unconfirmed' if event.expired else ''}, seq {event.sequence}"
        case cache.CacheCleared():
            return f"seq {event.sequence}"
        case cache.CacheGap():
            return f"{event.missed} engine events missed: {event.reason}"
        case fleet.InstanceJoined():
            return f"{event.url} {event.model}, {event.kv_capacity_tokens:,} tokens of KV, cache {event.cache}{f' ({event.cache_detail})' if event.cache_detail else ''}, epoch {event.epoch}"
        case fleet.InstanceReported():
            return _report(event)
        case fleet.InstanceProbed():
            agreed = event.detail or "keys agree"
            return agreed if event.parity else f"keys differ: {event.detail}"
        case fleet.InstanceSuspected():
            return f"silent for {seconds(event.silent_seconds)}"
        case fleet.InstanceDraining():
            becomes = f", then its role is {event.becomes}" if event.becomes else ""
            return event.reason + becomes + _by(event.by)
        case fleet.InstanceRoleChanged():
            return f"to {event.role}, {event.left} requests left of the old role"
        case fleet.InstanceLeft():
            return event.reason
        case fleet.InstanceEjected():
            return f"for {seconds(event.seconds)}, {event.cause}, number {event.number} in a row: {event.detail}"
        case fleet.InstanceUnejected():
            return "one request at a time may try it" if event.half_open else "it has proved well"
        case fleet.InstanceUndrained():
            return _by(event.by).removeprefix(", ")
        case requests.RequestArrived():
            return _arrival(event)
        case decisions.RequestPlaced():
            return _placement(event)
        case decisions.RequestGranted():
            fetch = f"  fetches {event.fetched_tokens} tokens from {event.fetch_from}" if event.fetch_from else ""
            copy = f"  then copies {event.copy_blocks} blocks to {event.copy_to}" if event.copy_to else ""
            return f"-> {event.instance}{_attempt(event.attempt)}{fetch}{copy}"
        case decisions.HandOverRefused():
            return f"{event.source}{_attempt(event.attempt)}  prefill {seconds(event.prefill)}, {event.reason}: {event.detail}"
        case decisions.RequestHandedOver():
            return f"{event.source} -> {event.instance}{_attempt(event.attempt)}  prefill {seconds(event.prefill)}: {event.reason}"
        case decisions.RequestMigrated():
            out = f" out of its engine, {seconds(event.wasted)} wasted" if event.rebound else ""
            return f"{event.source} -> {event.instance}{out}  TTFT {seconds(event.predicted_ttft)}: {event.reason}"
        case decisions.MigrationRefused():
            return f"{event.source} -> {event.instance} not made, {event.reason}: {event.detail}"
        case decisions.RequestRejected():
            return (
                f"{event.reason}: {event.detail}, retry after {seconds(event.retry_after)}  {_others(event)}".rstrip()
            )
        case requests.PrefillFinished():
            return f"{event.instance}  TTFT {seconds(event.ttft)}, prefill {seconds(event.prefill)}"
        case requests.RequestFinished():
            return _finish(event)
        case requests.PrefixFetchEnded() | requests.PrefixCopyEnded():
            how = f"failed: {event.failure}" if event.failure else f"{event.tokens} tokens"
            return f"{event.source} -> {event.instance}{_attempt(event.attempt)}  {how}, {seconds(event.seconds)}"
        case requests.RequestAttemptFailed():
            return f"{event.instance}{_attempt(event.attempt)}  {event.failure} {event.status or ''} {event.detail}".rstrip()
        case requests.RequestFailed():
            return f"{event.status} {event.reason}  {event.instance}".rstrip()
        case requests.RequestCancelled():
            return f"{event.reason}  {event.instance}".rstrip()
        case decisions.LeaderElected():
            return f"{event.scheduler}, term {event.term}, state as of {event.as_of}"
        case decisions.WritesLost():
            return f"{event.count} of {event.writer}: {event.reason}"
        case decisions.RequestsRefused():
            return f"{event.count} by {event.scheduler}: {event.reason}  {event.detail}".rstrip()
        case decisions.ScaleDecided():
            roles = f" ({event.prefill} prefill, {event.decode} decode)" if event.prefill and event.wanted else ""
            return f"{event.current} -> {event.wanted}{roles} by {event.policy}: {event.reason}{_by(event.by)}"
        case decisions.ScaleApplied():
            return f"{event.current} of {event.wanted} {event.detail}".rstrip()
        case TenantPoliciesSet():
            return policies_set(event.policies) + _by(event.by)
        case ApiKeyChanged():
            return f"{event.action} {event.key} of {event.tenant}{_by(event.by)}"
        case _:
            assert_never(event)


def _by(actor: str) -> str:
    return f", by {actor}" if actor else ""


def _in(tier: Tier) -> str:
    return "" if tier == "device" else f" in {tier}"


def _loads(event: decisions.RequestPlaced) -> str:
    if not event.loads:
        return ""
    tokens = ", ".join(f"{load.tokens:,} tokens from {load.tier}" for load in event.loads)
    return f", load {seconds(event.load_seconds)}: {tokens}"


def _placement(event: decisions.RequestPlaced) -> str:
    chosen = (
        f"-> {event.instance}{_attempt(event.attempt)}  hit {event.hit_blocks} blocks, {event.uncached_tokens} tokens to compute, "
        f"TTFT {seconds(event.predicted_ttft)} (queue {seconds(event.queue_seconds)}, prefill {seconds(event.prefill_seconds)}{_loads(event)})  "
        f"{event.policy}: {event.reason}"
    )
    if event.decode:
        chosen += f"  decoded at {event.decode}: {event.decode_reason}"
    return f"{chosen}  {_others(event)}".rstrip()


def _others(event: decisions.RequestPlaced | decisions.RequestRejected) -> str:
    chosen = event.instance if isinstance(event, decisions.RequestPlaced) else None
    rest = [
        f"{c.instance} {seconds(c.predicted_ttft)} hit {c.hit_blocks}" for c in event.candidates if c.instance != chosen
    ]
    if event.others:
        rest.append(f"{event.others:,} others")
    return f"| {', '.join(rest)}" if rest else ""


def _arrival(event: requests.RequestArrived) -> str:
    session = f", session {event.session}" if event.session else ""
    guessed = "" if event.exact else ", tokens guessed"
    guessed += f", held up {seconds(event.held_up)}" if event.held_up else ""
    return (
        f"{event.prompt_tokens} tokens in {_blocks(event.keys)}, {output_bound(event.max_output_tokens)} out, "
        f"{event.tenant or 'anonymous'}{session}{guessed}"
    )


def _finish(event: requests.RequestFinished) -> str:
    cached = f" ({event.cached_tokens} cached)" if event.cached_tokens >= 0 else ""
    return (
        f"{event.instance}  {event.prompt_tokens} tokens{cached}, {event.completion_tokens} out, "
        f"TTFT {seconds(event.ttft)}, TPOT {event.tpot * 1000:.1f} ms, end-to-end {seconds(event.e2e)}"
    )


def _report(event: fleet.InstanceReported) -> str:
    undecodable = f", {event.undecodable} undecodable" if event.undecodable else ""
    serving = "" if event.serving else "not serving, "
    return (
        f"{serving}{event.running} running, {event.waiting} waiting, KV {event.kv_usage:.0%}, "
        f"{event.blocks} blocks as of seq {event.sequence}{undecodable}"
    )


def _runs(runs: Sequence[Run]) -> str:
    blocks = _blocks(b"".join(run.keys for run in runs))
    return blocks if len(runs) == 1 else f"{blocks} in {len(runs)} runs"


def _blocks(packed: bytes) -> str:
    return plural(len(packed) // KEY_BYTES, "block")


def _attempt(attempt: int) -> str:
    return f" (attempt {attempt})" if attempt > 1 else ""


def _short_subject(subject: str) -> str:
    kind, *rest = subject.split(".")[2:]
    if kind == "request" and rest and len(rest[0]) > REQUEST_CHARS:
        return f"{kind}.…{rest[0][-REQUEST_CHARS:]}"
    return ".".join([kind, *rest])


def _style(event: LogEvent) -> str:
    about = "cyan" if isinstance(event, CacheEvent) else "magenta" if isinstance(event, FleetEvent) else ""
    return STYLES.get(type(event), about)
