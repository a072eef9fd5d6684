"""Where our numbers differ from what the papers claim: each claim, what was measured, and what explains it.

Which way a sentence goes is decided by the numbers: there is no judgement here that a run could prove wrong. Claims
whose studies were not run are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pointsman_lab.results.markdown import has, listed, table
from pointsman_lab.results.numbers import Numbers, StudyNumbers
from pointsman_lab.results.studies import MOVED, MOVED_ANYWHERE, PAPER, UNMOVED

AS_WRITTEN = f"dualmap, {PAPER}"
AS_WRITTEN_COOLER = f"{AS_WRITTEN}, hot above 1/n"
COMPARED = ("cache_affinity", "least_loaded", "min_ttft", "preble")
"""What DualMap's repository compares it with, by our names."""

WORKLOADS = (("conversation", "conversation"), ("tools", "tool-and-agent"))
LOADED_MIN = 0.5
"""Ratios of capacities are taken where the better one is at least this: far past saturation any ratio can be had."""

NOTICEABLE = 0.01
"""A difference of capacity below this is called none: a point, which other seeds may turn round."""

JAIN_TOLERANCE = 0.05
SERVICE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says, what was measured, and what explains the difference or shows the agreement."""

    paper: str
    says: str
    here: str
    agrees: bool
    because: str


def claims_section(numbers: Numbers) -> str:
    """A table of claims against numbers, and behind it the reasons."""
    found = [claim for make in CLAIMS for claim in make(numbers)]
    if not found:
        return ""
    head = ["", "paper", "says", "here", "the same"]
    rows = [
        [str(number), claim.paper, claim.says, claim.here, "yes" if claim.agrees else "**no**"]
        for number, claim in enumerate(found, start=1)
    ]
    reasons = [f"{number}. {claim.because}" for number, claim in enumerate(found, start=1)]
    differ = sum(not claim.agrees for claim in found)
    heading = "## Where this differs from the papers' claims"
    summary = f"Of {len(found)} claims, {differ} did not show here."
    return "\n".join(
        (heading, "", summary, "", table(head, rows), "", "What the numbers say of why:", "", *reasons, "")
    )


# --- DualMap ---


def _gain(numbers: Numbers) -> Iterator[Claim]:
    keys = [(f"placement-{key}", f"lag-{key}", called) for key, called in WORKLOADS if has(numbers, f"placement-{key}")]
    if not keys:
        return
    told, gains, reasons = [], [], []
    for fresh, lag, called in keys:
        gain, rate, rival = _best_ratio(numbers.studies[fresh], AS_WRITTEN)
        gains.append(gain)
        told.append(f"at best {gain:.2f} times `{rival}`, the strongest of those it names ({called}, {rate:g}/s)")
        if has(numbers, lag):
            aged, rate, rival = _best_ratio(numbers.studies[lag], AS_WRITTEN)
            way = "more" if aged > gain else "no more"
            reasons.append(
                f"on {called} with knowledge half a second old it is {way}: {aged:.2f} times `{rival}` at {rate:g}/s"
            )
    because = (
        f"The rivals {listed([f'`{name}`' for name in COMPARED])} see here what every placement of ours sees: load that is "
        "booked before the next request is looked at."
    )
    if reasons:
        because += (
            " How much of the advantage is robustness against old load shows where it is old: "
            + "; ".join(reasons)
            + "."
        )
    yield Claim(
        "DualMap",
        "up to 2.25 times the effective capacity of the best other",
        "; ".join(told),
        max(gains) >= 2,
        because,
    )


def _best_ratio(study: StudyNumbers, row: str) -> tuple[float, float, str]:
    """The highest ratio over the strongest compared policy, the rate where it is, and that policy."""
    found = []
    for rate in study.rates():
        rival = max(COMPARED, key=lambda name: study.capacity(name, rate))
        ours, theirs = study.capacity(row, rate), study.capacity(rival, rate)
        if theirs and max(ours, theirs) >= LOADED_MIN:
            found.append((ours / theirs, rate, rival))
    return max(found, default=(0.0, study.rates()[0], COMPARED[0]))


def _hot_threshold(numbers: Numbers) -> Iterator[Claim]:
    told, better, reasons = [], [], []
    for key, called in WORKLOADS:
        if not has(numbers, f"dualmap-{key}"):
            continue
        study = numbers.studies[f"dualmap-{key}"]
        written = _gap(study, AS_WRITTEN_COOLER, AS_WRITTEN)
        affine = _gap(study, "dualmap", "dualmap, hot above 2/n")
        told.append(f"1/n instead: {_points(written)} as written, {_points(affine)} with affinity kept ({called})")
        better += [written, affine]
        reasons.append(
            f"on {called} the load CV is {_mean(study, AS_WRITTEN_COOLER, 'load_cv'):.2f} with 1/n and "
            f"{_mean(study, AS_WRITTEN, 'load_cv'):.2f} with 2/n, hit rates "
            f"{_mean(study, AS_WRITTEN_COOLER, 'hit_rate'):.3f} and {_mean(study, AS_WRITTEN, 'hit_rate'):.3f}"
        )
    if told:
        agrees = fmean(better) < NOTICEABLE
        because = "A prefix with a share of 2/n fills both instances of its pair before it is split: " + "; ".join(
            reasons
        )
        yield Claim("DualMap", "a prefix is hot above 2/n of the traffic", "; ".join(told), agrees, because + ".")


def _both_over(numbers: Numbers) -> Iterator[Claim]:
    told, gaps, reasons = [], [], []
    for key, called in WORKLOADS:
        if not has(numbers, f"dualmap-{key}"):
            continue
        study = numbers.studies[f"dualmap-{key}"]
        gap = _gap(study, "dualmap", AS_WRITTEN_COOLER)
        gaps.append(gap)
        told.append(f"to stay with the cache instead gives {_points(gap)} ({called})")
        kept, left = _mean(study, "dualmap", "hit_rate"), _mean(study, AS_WRITTEN_COOLER, "hit_rate")
        reasons.append(
            f"{called}: hit rate {kept:.3f} with affinity, {left:.3f} without, "
            f"so leaving {'costs' if left < kept else 'saves'} {abs(kept - left):.1%} of all prompt tokens"
        )
    if told:
        because = "Who leaves a full pair computes the prefix anew, and everyone behind waits for that: "
        yield Claim(
            "DualMap",
            "where both of the pair would be late, go to the less loaded",
            "; ".join(told),
            fmean(gaps) < NOTICEABLE,
            because + "; ".join(reasons) + ".",
        )


def _fresh_greed(numbers: Numbers) -> Iterator[Claim]:
    told, fresh_gaps, reasons = [], [], []
    for key, called in WORKLOADS:
        if not has(numbers, f"placement-{key}", f"lag-{key}"):
            continue
        fresh = _gap(numbers.studies[f"placement-{key}"], AS_WRITTEN, "min_ttft")
        aged = _gap(numbers.studies[f"lag-{key}"], AS_WRITTEN, "min_ttft")
        fresh_gaps.append(fresh)
        told.append(f"{_points(fresh)} against `min_ttft` ({called})")
        turn = "and the order turns" if fresh < 0 < aged else "and the order stays"
        reasons.append(f"{_points(aged)} on {called}, {turn}")
    if told:
        because = (
            "A greedy choice among all instances is as good as what it knows. With knowledge half a second old many "
            "requests find the same idle instance, while two candidates of each prefix limit how many can: "
        )
        yield Claim(
            "DualMap",
            "two candidates beat the lowest predicted TTFT among all instances",
            "; ".join(told),
            min(fresh_gaps) > 0,
            because + "; ".join(reasons) + ".",
        )


REBALANCED = (
    ("fresh", "fresh knowledge"),
    ("lag", "old knowledge"),
    ("slow", "a slow instance"),
    ("hot", "two hot prefixes"),
)


def _rebalancing(numbers: Numbers) -> Iterator[Claim]:
    told, gains = [], []
    for key, called in REBALANCED:
        if not has(numbers, f"rebalancing-{key}"):
            continue
        study = numbers.studies[f"rebalancing-{key}"]
        off, pair, anywhere = (f"{AS_WRITTEN}, {note}" for note in (UNMOVED, MOVED, MOVED_ANYWHERE))
        gain = _gap(study, pair, off)
        gains.append((gain, called))
        told.append(
            f"{called}: {_mean(study, pair, 'migrations'):.0f} of 1,000 moved, {_points(gain)} "
            f"(to any instance: {_points(_gap(study, anywhere, off))})"
        )
    if told:
        best, where = max(gains)
        helps = [called for gain, called in gains if gain >= NOTICEABLE]
        because = (
            f"Within the pair it helps noticeably with {listed(helps)}; the most, {_points(best)}, with {where}."
            if helps
            else f"Within the pair it helps noticeably nowhere; the most is {_points(best)}, with {where}."
        )
        because += (
            " A placement that sees fresh load has looked at both of the pair already, so little is left to move between "
            "them; a third instance it has not looked at."
        )
        yield Claim(
            "DualMap",
            "moving requests within the pair resolves hotspots",
            "; ".join(told),
            len(helps) == len(gains),
            because,
        )


def _front(numbers: Numbers) -> Iterator[Claim]:
    told, on_it = [], []
    for key, called in WORKLOADS:
        if not has(numbers, f"placement-{key}"):
            continue
        study = numbers.studies[f"placement-{key}"]
        rate = study.rates()[len(study.rates()) // 2]
        named = (AS_WRITTEN, *COMPARED)
        places = {row: (_at(study, row, rate, "hit_rate"), _at(study, row, rate, "load_cv")) for row in named}
        hit, cv = places[AS_WRITTEN]
        beaten = [row for row, (h, c) in places.items() if row != AS_WRITTEN and h >= hit and c <= cv]
        on_it.append(not beaten)
        told.append(
            f"hit rate {hit:.3f} at a load CV of {cv:.2f}, "
            + (
                f"beaten in both by {listed([f'`{row}`' for row in beaten])}"
                if beaten
                else "beaten in both by none of them"
            )
            + f" ({called}, {rate:g}/s)"
        )
    if told:
        yield Claim(
            "DualMap, Fig. 1",
            "it is on the front of hit rate against balance",
            "; ".join(told),
            all(on_it),
            "Even queues are no aim in themselves: the queues of `pointsman` are less even than those of DualMap as written, "
            "and it serves more on time."
            if _ours_uneven(numbers)
            else "The front says nothing of who is on time: compare the capacities.",
        )


def _ours_uneven(numbers: Numbers) -> bool:
    """Whether ours has both the more uneven queues and the higher capacity, on every workload that was run."""
    shown = []
    for key, _ in WORKLOADS:
        if has(numbers, f"placement-{key}"):
            study = numbers.studies[f"placement-{key}"]
            rate = study.rates()[len(study.rates()) // 2]
            uneven = _at(study, "pointsman", rate, "load_cv") > _at(study, AS_WRITTEN, rate, "load_cv")
            shown.append(uneven and study.capacity("pointsman", rate) > study.capacity(AS_WRITTEN, rate))
    return all(shown)


# --- Randomization Boosts KV Caching, Learning Balances Query Load ---

ROUTINGS = ("cache_affinity", "sticky_least_loaded, cache-aware", "lbgr")
ORDERS = (("random", "random order"), ("round-robin", "round robin"))
SMALL, LARGER = "120k", "180k"


def _of_eviction(numbers: Numbers) -> Iterator[tuple[str, str, StudyNumbers]]:
    """Each study that was made, with its order and the size of its caches."""
    for order, called in ORDERS:
        for size in (SMALL, LARGER):
            key = f"eviction-{order}-{size}"
            if has(numbers, key):
                yield called, size, numbers.studies[key]


def _randomised_eviction(numbers: Numbers) -> Iterator[Claim]:
    told, wins, gains = [], [], []
    for called, size, study in _of_eviction(numbers):
        pairs = [(_mean(study, f"{r}, lru", "hit_rate"), _mean(study, f"{r}, rlt", "hit_rate")) for r in ROUTINGS]
        wins += [randomised >= lru for lru, randomised in pairs if size == SMALL]
        lru, randomised = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
        gains.append((randomised - lru, called, size))
        told.append(f"{called}, {size} tokens: {lru:.3f} with LRU, {randomised:.3f} with RLT")
    if told:
        best, called, size = max(gains)
        least, least_called, least_size = min(gains)
        because = (
            f"It gains most, {best:+.1%} of all prompt tokens, with {called} and {size}: there LRU forgets just what comes "
            f"next. The least is {least:+.1%}, with {least_called} and {least_size}"
            + (": where what is in use nearly fits, random choice forgets some of it too." if least < 0 else ".")
        )
        yield Claim(
            "RLT, Tables 2 and 3",
            "up to 6.92 times LRU's hit rate, in either order",
            "; ".join(told),
            bool(wins) and all(wins),
            because,
        )


def _learned_routing(numbers: Numbers) -> Iterator[Claim]:
    told, wins, rest = [], [], []
    for called, size, study in _of_eviction(numbers):
        learned = _mean(study, "lbgr, rlt", "ttft_p90_s")
        aware = {name: _mean(study, f"{name}, lru", "ttft_p90_s") for name in ROUTINGS[:2]}
        wins += [learned <= seconds for seconds in aware.values()]
        told.append(
            f"{called}, {size}: {learned:.2f} s against {aware[ROUTINGS[1]]:.2f} s with SGLang's rule and "
            f"{aware[ROUTINGS[0]]:.2f} s with a hash"
        )
        low, high = study.rates()[0], study.rates()[-1]
        rest += [
            f"{called}, {size}, same eviction (RLT): {_at(study, 'lbgr, rlt', rate, 'ttft_p90_s'):.2f} s against "
            f"{_at(study, f'{ROUTINGS[1]}, rlt', rate, 'ttft_p90_s'):.2f} s at {rate:g}/s"
            for rate in (low, high)
        ]
    if told:
        yield Claim(
            "LBGR with RLT against cache-aware with LRU, Tables 2 and 3",
            "up to 14.06 times lower TTFT",
            "TTFT P90, mean over rates: " + "; ".join(told),
            all(wins),
            "How much of it is routing, LBGR against SGLang's rule: " + "; ".join(rest) + ".",
        )


# --- Locality-aware Fair Scheduling ---


def _fair(numbers: Numbers) -> Iterator[Claim]:
    told, held, ours = [], [], []
    for key, study in numbers.studies.items():
        if not key.startswith("fairness-"):
            continue
        rate = study.rates()[-1]
        jain = {order: _at(study, f"d2lpm + {order}", rate, "jain") for order in ("dlpm", "vtc", "lpm")}
        service = {order: _at(study, f"d2lpm + {order}", rate, "service_per_s") for order in ("dlpm", "lpm")}
        share = service["dlpm"] / service["lpm"] if service["lpm"] else 0.0
        held.append(jain["dlpm"] >= jain["vtc"] - JAIN_TOLERANCE and share >= SERVICE_SHARE)
        own = _at(study, "pointsman + fair_edf", rate, "jain")
        ours.append((key, own, own - jain["vtc"]))
        told.append(
            f"{key.removeprefix('fairness-')}: Jain {jain['dlpm']:.3f}, VTC {jain['vtc']:.3f}, LPM {jain['lpm']:.3f}; "
            f"service {share:.2f} of LPM's"
        )
    if told:
        worst_key, worst, behind = min(ours, key=lambda one: one[2])
        yield Claim(
            "Locality-aware Fair Scheduling",
            "`d2lpm` with `dlpm` is about as fair as VTC and serves about as much as LPM",
            "; ".join(told),
            all(held),
            f"Asked is a Jain's index within {JAIN_TOLERANCE} of VTC's and {SERVICE_SHARE:.0%} of LPM's service, at the "
            f"higher rate. `pointsman` with `fair_edf` has {worst:.3f} where it compares worst with VTC, "
            f"{behind:+.3f} ({worst_key.removeprefix('fairness-')}).",
        )


CLAIMS: Sequence[Callable[[Numbers], Iterator[Claim]]] = (
    _gain,
    _front,
    _both_over,
    _hot_threshold,
    _fresh_greed,
    _rebalancing,
    _randomised_eviction,
    _learned_routing,
    _fair,
)


# --- Arithmetic ---


def _gap(study: StudyNumbers, row: str, other: str) -> float:
    """How much more is on time with `row` than with `other`, mean over rates."""
    return fmean(study.capacity(row, rate) - study.capacity(other, rate) for rate in study.rates())


def _points(gap: float) -> str:
    return f"{100 * gap:+.1f} points"


def _at(study: StudyNumbers, row: str, rate: float, name: str) -> float:
    metrics: dict[str, float] = dict(study.point(row, rate).metrics)
    return metrics.get(name, 0.0)


def _mean(study: StudyNumbers, row: str, name: str) -> float:
    return fmean(_at(study, row, rate, name) for rate in study.rates())
