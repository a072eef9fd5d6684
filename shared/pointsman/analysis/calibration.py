"""Fits simulated engines to recorded ones. Lone prefills are fitted by `way + slope * predicted` (Theil-Sen, robust to
stalls), in the log and in a simulation at speed 1; the ratio of slopes is the speed, the rest is time outside the
engine. If slopes disagree, the speed comes from TPOT and the pace of other instances, at most 1. A record that the simulation
gives back as it is (it was simulated itself) needs no fit."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from pointsman.contracts.fleet import InstanceJoined, PrefillCost
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.simulation.metrics import tpot
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES, EngineProfile

POINTS_MAX = 200
POINTS_MIN = 8
PAIRS_MIN = 20
APART_SHARE = 0.25
AGREEMENT_MAX = 1.0
"""Interquartile range of the slopes over their median; above it the fit is rejected."""

SPEED_MIN, SPEED_MAX = 0.05, 4.0
CLEARLY_SLOWER = 1.5
AS_PREDICTED = 0.1
SAME_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class Point:
    number: int
    predicted: EngineSeconds
    took: EngineSeconds


@dataclass(frozen=True, slots=True)
class Fit:
    way: EngineSeconds
    slope: float

    @classmethod
    def of(cls, points: Sequence[Point], *, slope: float) -> "Fit | None":
        if not points:
            return None
        return cls(max(0.0, median(point.took - slope * point.predicted for point in points)), slope)

    def at(self, predicted: EngineSeconds) -> EngineSeconds:
        return self.way + self.slope * predicted


@dataclass(frozen=True, slots=True)
class Calibration:
    """Speed of each instance relative to its cost model, and seconds outside engines."""

    speeds: dict[InstanceId, float]
    ways: dict[int, EngineSeconds]
    way_seconds: EngineSeconds

    @property
    def usual_speed(self) -> float:
        return median(self.speeds.values()) if self.speeds else 1.0


def profile_of(join: InstanceJoined) -> EngineProfile:
    preset = next((p for p in PROFILES.values() if p.prefill_cost == join.prefill), None)
    profile = preset or _profile_from(join.prefill)
    if join.decode is not None and join.decode != profile.decode_cost:
        profile = replace(
            profile,
            decode_step_s=join.decode.step_s + join.decode.per_request_s,
            kv_bytes_per_token=join.decode.per_context_token_s * profile.memory_bytes_per_s
            or profile.kv_bytes_per_token,
        )
    return replace(profile, kv_capacity_tokens=join.kv_capacity_tokens)


def usual_profile(joins: Iterable[InstanceJoined]) -> EngineProfile:
    """That of most instances. A simulated fleet has one."""
    return Counter(map(profile_of, joins)).most_common(1)[0][0]


def _profile_from(cost: PrefillCost) -> EngineProfile:
    """One layer of width 1 at one operation per second, so that factors are seconds."""
    usual = PROFILES[DEFAULT_PROFILE]
    return EngineProfile(
        name="as recorded",
        layers=1,
        hidden=1,
        attention_factor=cost.per_token_squared_s,
        linear_factor=cost.per_token_s,
        flops_per_s=1.0,
        weight_bytes=cost.floor_s,
        kv_bytes_per_token=usual.kv_bytes_per_token / usual.memory_bytes_per_s,
        memory_bytes_per_s=1.0,
        step_overhead_s=cost.fixed_s,
        kv_capacity_tokens=usual.kv_capacity_tokens,
    )


def calibrate(recorded: Outcome, simulated: Outcome, cost: PrefillCost, instances: Sequence[InstanceId]) -> Calibration:
    real, ideal = lone_prefills(recorded.rows, cost), lone_prefills(simulated.rows, cost)
    if _is_given_back(recorded.rows, simulated.rows):
        lone = [point.number for group in real.values() for point in group]
        return Calibration(dict.fromkeys(instances, 1.0), dict.fromkeys(lone, 0.0), 0.0)
    real_tpot, ideal_tpot = _tpots(recorded.rows), _tpots(simulated.rows)
    paces = {name: _pace(group) for name, group in real.items() if len(group) >= POINTS_MIN}
    points = [point for group in ideal.values() for point in group]
    ideal_fit = Fit.of(points, slope=slope_of(points) or 1.0)
    usual_tpot = median(ideal_tpot.values()) if ideal_tpot else 0.0
    speeds: dict[InstanceId, float] = {}
    ways: dict[int, EngineSeconds] = {}
    for name in instances:
        own = real.get(name, [])
        if len(own) < POINTS_MIN or ideal_fit is None:
            continue
        slope = slope_of(own)
        decoding = ideal_tpot.get(name, usual_tpot) / real_tpot[name] if real_tpot.get(name) and usual_tpot else 1.0
        other_signs = min(1.0, decoding, _against_others(name, paces))
        speed = min(SPEED_MAX, max(SPEED_MIN, ideal_fit.slope / slope if slope else other_signs))
        speeds[name] = 1.0 if abs(speed - 1.0) < AS_PREDICTED else speed
        line = Fit(ideal_fit.way, ideal_fit.slope / speeds[name])
        ways |= {point.number: max(0.0, point.took - line.at(point.predicted)) for point in own}
    usual = median(speeds.values()) if speeds else 1.0
    return Calibration(
        speeds={name: speeds.get(name, usual) for name in instances},
        ways=ways,
        way_seconds=median(ways.values()) if ways else 0.0,
    )


def _is_given_back(recorded: Sequence[RequestRow], simulated: Sequence[RequestRow]) -> bool:
    return all(
        one.instance == other.instance
        and (one.ttft is None) == (other.ttft is None)
        and abs((one.ttft or 0.0) - (other.ttft or 0.0)) < SAME_SECONDS
        for one, other in zip(recorded, simulated, strict=True)
    )


def lone_prefills(rows: Iterable[RequestRow], cost: PrefillCost) -> dict[InstanceId, list[Point]]:
    found: dict[InstanceId, list[Point]] = {}
    busy_until: dict[InstanceId, EngineSeconds] = {}
    inside = [row for row in rows if row.granted_at is not None and row.first_token_at is not None and row.instance]
    for row in sorted(inside, key=lambda row: row.granted_at or 0.0):
        assert row.granted_at is not None
        assert row.first_token_at is not None
        assert row.instance is not None
        if row.granted_at >= busy_until.get(row.instance, 0.0):
            predicted = cost.seconds(row.prompt_tokens, row.cached_tokens)
            found.setdefault(row.instance, []).append(Point(row.number, predicted, row.first_token_at - row.granted_at))
        busy_until[row.instance] = max(row.first_token_at, busy_until.get(row.instance, 0.0))
    return found


def slope_of(points: Sequence[Point]) -> float | None:
    """Real over predicted seconds; None if pairs disagree or are too few."""
    kept = points[:: max(1, -(-len(points) // POINTS_MAX))]
    if len(kept) < POINTS_MIN:
        return None
    apart = APART_SHARE * median(point.predicted for point in kept)
    slopes = sorted(
        (one.took - other.took) / (one.predicted - other.predicted)
        for one, other in combinations(kept, 2)
        if abs(one.predicted - other.predicted) > apart
    )
    if len(slopes) < PAIRS_MIN:
        return None
    slope, low, high = median(slopes), slopes[len(slopes) // 4], slopes[len(slopes) * 3 // 4]
    return slope if slope > 0 and high - low <= AGREEMENT_MAX * slope else None


def _pace(points: Sequence[Point]) -> float:
    return median(point.took / point.predicted for point in points if point.predicted > 0)


def _against_others(name: InstanceId, paces: dict[InstanceId, float]) -> float:
    others = [pace for other, pace in paces.items() if other != name]
    usual = median(others) if others else paces[name]
    return usual / paces[name] if paces[name] > CLEARLY_SLOWER * usual else 1.0


def _tpots(rows: Iterable[RequestRow]) -> dict[InstanceId, EngineSeconds]:
    found: dict[InstanceId, list[EngineSeconds]] = {}
    for row in rows:
        seconds = tpot(row)
        if seconds and row.instance:
            found.setdefault(row.instance, []).append(seconds)
    return {name: median(values) for name, values in found.items()}
