"""Compares two runs of the same requests: how well the simulator reproduces a record, and the regret of one policy
against another."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from pointsman.analysis.recorded_traffic import Record
from pointsman.primitives import EngineSeconds
from pointsman.simulation.metrics import Report, summarise
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.simulator import Scenario

CAPACITY_OFF_MAX = 0.1
P90_OFF_SHARE_MAX = 0.35
TPOT_OFF_SHARE_MAX = 0.35
HIT_RATE_OFF_MAX = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    note: str
    outcome: Outcome
    scenario: Scenario
    report: Report
    warmup: int

    @property
    def rows(self) -> Sequence[RequestRow]:
        """Of the counted requests."""
        return self.outcome.rows[self.warmup :]

    @property
    def goodput(self) -> float | None:
        """Requests answered on time, per second of arrivals."""
        rows = self.rows
        seconds = rows[-1].arrived_at - rows[0].arrived_at if rows else 0.0
        return sum(row.on_time for row in rows) / seconds if seconds > 0 else None


def side(note: str, outcome: Outcome, scenario: Scenario, record: Record) -> Side:
    report = summarise(outcome, warmup=record.warmup)
    return Side(note=note, outcome=outcome, scenario=scenario, report=report, warmup=record.warmup)


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """What is lost by not choosing the change; positive: the change is better. Differences of TTFT and of shares are those
    of the two reports. None: nothing to compare."""

    requests: int
    """Those that both runs served; `ttft_mean_s` is over them."""
    ttft_mean_s: EngineSeconds | None
    ttft_p50_s: EngineSeconds | None
    ttft_p90_s: EngineSeconds | None
    hit_rate: float | None
    effective_capacity: float | None
    goodput: float | None
    on_time_gained: int
    """On time only with the change."""
    on_time_lost: int


def regret(running: Side, changed: Side) -> Regret:
    """Both are of the same requests."""
    pairs = list(zip(running.rows, changed.rows, strict=True))
    late = [one.ttft - other.ttft for one, other in pairs if one.ttft is not None and other.ttft is not None]
    before, after = running.report, changed.report
    return Regret(
        requests=len(late),
        ttft_mean_s=fmean(late) if late else None,
        ttft_p50_s=_less(before.ttft.p50_s, after.ttft.p50_s),
        ttft_p90_s=_less(before.ttft.p90_s, after.ttft.p90_s),
        hit_rate=_less(after.hit_rate, before.hit_rate),
        effective_capacity=_less(after.effective_capacity, before.effective_capacity),
        goodput=_less(changed.goodput, running.goodput),
        on_time_gained=sum(other.on_time and not one.on_time for one, other in pairs),
        on_time_lost=sum(one.on_time and not other.on_time for one, other in pairs),
    )


def fidelity(recorded: Report, again: Report) -> tuple[bool, str]:
    """Whether the simulator reproduces the record, and a sentence about it."""
    capacity = (again.effective_capacity or 0.0) - (recorded.effective_capacity or 0.0)
    hits = (again.hit_rate or 0.0) - (recorded.hit_rate or 0.0)
    ttft, tpot = _off(recorded.ttft.p90_s, again.ttft.p90_s), _off(recorded.tpot.p50_s, again.tpot.p50_s)
    parts = {
        f"capacity {capacity * 100:+.1f} points": abs(capacity) <= CAPACITY_OFF_MAX,
        f"TTFT P90 {ttft:+.0%}": abs(ttft) <= P90_OFF_SHARE_MAX,
        f"TPOT P50 {tpot:+.0%}": abs(tpot) <= TPOT_OFF_SHARE_MAX,
        f"hit rate {hits * 100:+.1f} points": abs(hits) <= HIT_RATE_OFF_MAX,
    }
    text, far = ", ".join(parts), ", ".join(part for part, near in parts.items() if not near)
    if not far:
        return True, f"the simulator reproduces the record: {text} against the record"
    return False, (
        f"the simulator does not reproduce the record: {far} is too far from it (of {text}). Compare the change with the "
        "re-simulation only, and do not rely on its size"
    )


def _off(real: float | None, simulated: float | None) -> float:
    """Relative; 0 if the record has nothing to compare."""
    return ((simulated or 0.0) - real) / real if real else 0.0


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
