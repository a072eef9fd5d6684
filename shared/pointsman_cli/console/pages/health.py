"""One line about a pool's health, and about the requests of a list: what asks most for attention comes first. Judges the
views alone."""

from collections.abc import Iterator
from typing import NamedTuple

from pointsman.state.correction import CORRECTION_MAX
from pointsman_cli.console.pages.cells import LEVELS, Level, listed
from pointsman_cli.console.views import FleetView, HistoryView, InstanceView, RequestsView, RequestView, StatusView
from pointsman_cli.formatting import plural

GOODPUT_WARNING, GOODPUT_SERIOUS = 0.95, 0.7
HIT_GAP_WARNING = 0.1
PACE_WARNING = 2.0
NAMED_MAX = 3
ORDER: tuple[Level, ...] = ("serious", "warning", "note", "ok")
WORDS: dict[Level, str] = {"ok": "Healthy", "note": "Quiet", "warning": "Attention", "serious": "Problem"}


class Verdict(NamedTuple):
    level: Level
    sentence: str
    more: list[str]
    called: str = ""

    @property
    def word(self) -> str:
        return self.called or WORDS[self.level]


class Trouble(NamedTuple):
    level: Level
    sentence: str


def pool_verdict(fleet: FleetView, status: StatusView) -> Verdict:
    troubles = sorted(_troubles(fleet, status), key=lambda trouble: ORDER.index(trouble.level))
    if troubles:
        first, *others = troubles
        return Verdict(first.level, first.sentence, [trouble.sentence for trouble in others])
    totals = fleet.totals
    engines = f"{plural(totals.ready, 'engine')} ready, every cache index exact"
    if totals.goodput is None:
        return Verdict("ok", f"{engines}. No request was answered in the last minute.", [])
    return Verdict("ok", f"{engines}, {totals.goodput:.1%} of requests in time.", [])


def _troubles(fleet: FleetView, status: StatusView) -> Iterator[Trouble]:
    totals, engines = fleet.totals, fleet.instances
    if status.health == "disconnected":
        yield Trouble("serious", "The console has no connection to the log: the numbers below are old.")
    if status.silent_seconds:
        yield Trouble(
            "serious", f"No entry has come into the log for {status.silent_seconds} s: the numbers below are old."
        )
    yield from (Trouble("warning", f"{problem}.".replace("..", ".")) for problem in status.problems)
    if not engines:
        earlier = len(fleet.moments) > 1
        now = "no longer has an engine; the list below shows earlier moments" if earlier else "has no engine"
        yield Trouble("warning", f"Pool {status.pool} {now}.")
        return
    yield from _out_of_service(engines, totals.ready)
    yield from _service(fleet)
    if fleet.lost:
        yield Trouble("warning", f"Gone without having been stopped: {listed(fleet.lost, 3)}.")
    for word, level in (("blind", "serious"), ("degraded", "warning")):
        names = [engine.instance for engine in engines if engine.knowledge == word]
        if names:
            what = "what their caches hold is not known" if word == "blind" else "what their caches hold is uncertain"
            one = what.replace("their caches hold", "its cache holds")
            yield Trouble(LEVELS[level], f"{listed(names, 3)}: {one if len(names) == 1 else what} ({word}).")
    slow = [engine.instance for engine in engines if engine.pace >= PACE_WARNING]
    if slow:
        named = "All engines" if len(slow) == len(engines) > 1 else listed(slow, 3)
        yield Trouble("warning", f"{named}: prefills take at least {PACE_WARNING:g} times what the cost model says.")
    if fleet.unregistered:
        yield Trouble("warning", f"{listed(fleet.unregistered, 3)}: reporting, but never joined.")


def _out_of_service(engines: list[InstanceView], ready: int) -> Iterator[Trouble]:
    out = [engine for engine in engines if LEVELS.get(engine.status) in {"serious", "warning"}]
    if not ready:
        yield Trouble("serious", f"No engine is ready: of {plural(len(engines), 'engine')} {_by_status(engines)}.")
    elif out:
        yield Trouble(
            "serious" if len(out) * 2 >= len(engines) else "warning",
            f"{len(out):,} of {plural(len(engines), 'engine')} out of service: {_by_status(out)}.",
        )


def _by_status(engines: list[InstanceView]) -> str:
    found: dict[str, list[str]] = {}
    for engine in engines:
        found.setdefault(engine.status, []).append(engine.instance)
    if len(engines) <= NAMED_MAX:
        return "; ".join(f"{listed(names)} {status}" for status, names in found.items())
    return ", ".join(f"{len(names):,} {status}" for status, names in found.items())


def _service(fleet: FleetView) -> Iterator[Trouble]:
    totals = fleet.totals
    if totals.goodput is not None and totals.goodput < GOODPUT_WARNING:
        queued = f"; {plural(totals.pending, 'request')} waiting" if totals.pending else ""
        rejected = f"; {totals.rejected:,} rejected" if totals.rejected else ""
        yield Trouble(
            goodput_level(totals.goodput),
            f"{1 - totals.goodput:.1%} of the last minute's requests were not served in time{rejected}{queued}.",
        )
    if totals.placed_alone:
        placed = plural(totals.placed_alone, "request")
        yield Trouble(
            "serious", f"{placed} of the last minute placed by ingresses alone, because no scheduler answered."
        )
    if totals.failed:
        yield Trouble("warning", f"{plural(totals.failed, 'request')} failed in the last minute.")
    real, predicted = totals.hit_rate, totals.predicted_hit_rate
    if real is not None and predicted is not None and predicted - real > HIT_GAP_WARNING:
        yield Trouble(
            "warning", f"Engines found {real:.0%} of prompt tokens cached where {predicted:.0%} were predicted."
        )


def _pace(pace: float) -> str:
    """The latency model learns no more than CORRECTION_MAX."""
    return f"at least {pace:.1f}" if pace >= CORRECTION_MAX else f"{pace:.1f}"


def attention(fleet: FleetView) -> list[tuple[Level, InstanceView, str, str]]:
    """Engines to look at, worst first, each with a word and its reason."""
    found: list[tuple[Level, InstanceView, str, str]] = []
    for engine in fleet.instances:
        of_status, of_knowledge = LEVELS.get(engine.status, "note"), LEVELS.get(engine.knowledge, "note")
        if of_status in {"serious", "warning"}:
            found.append((of_status, engine, engine.status, engine.status_reason))
        elif of_knowledge in {"serious", "warning"}:
            found.append((of_knowledge, engine, engine.knowledge, engine.knowledge_reason))
        elif engine.pace >= PACE_WARNING:
            found.append(
                ("warning", engine, "slow", f"prefills take {_pace(engine.pace)} times what the cost model says")
            )
    return sorted(found, key=lambda one: ORDER.index(one[0]))


def goodput_level(goodput: float) -> Level:
    return "ok" if goodput >= GOODPUT_WARNING else "warning" if goodput >= GOODPUT_SERIOUS else "serious"


def requests_verdict(view: RequestsView, slowest: bool = False) -> Verdict:
    shown = view.requests
    if not shown:
        return Verdict("note", "No request fits." if view.kept else "No request has come by yet.", [])
    if slowest:
        return _of_slowest(shown[0], view.matching)
    words = ("in time", "late", "unserved", "left out", "open")
    numbers = {word: sum(one.lateness == word for one in shown) for word in words}
    ended = numbers["in time"] + numbers["late"] + numbers["unserved"]
    goodput = numbers["in time"] / ended if ended else 1.0
    said = ", ".join(f"{number:,} {word}" for word, number in numbers.items() if number)
    return Verdict(goodput_level(goodput), f"Of the newest {plural(len(shown), 'request')}: {said}.", [])


def _of_slowest(worst: RequestView, matching: int) -> Verdict:
    objective = f", its SLO is {worst.slo_ttft:.2f} s" if worst.slo_ttft > 0 else ""
    of = f"the slowest of {matching:,} requests" if matching > 1 else "the only request that fits"
    what, seconds = ("First token", worst.ttft) if worst.ttft is not None else (worst.stage.capitalize(), worst.e2e)
    return Verdict(
        LEVELS[worst.lateness],
        f"{what} after {max(0.0, seconds or 0.0):.2f} s: {of}{objective}.",
        [],
        worst.lateness.capitalize(),
    )


def history_verdict(view: HistoryView) -> Verdict:
    wanted = "" if view.wanted is None else f", {view.wanted:,} wanted"
    moves = f"{plural(view.moved, 'request')} moved, {view.refused:,} moves refused"
    behind = view.wanted is not None and view.ready < view.wanted
    return Verdict("warning" if behind else "ok", f"{plural(view.ready, 'engine')} ready{wanted}; {moves}.", [])
