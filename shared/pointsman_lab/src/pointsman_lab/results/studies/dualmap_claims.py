"""The headlines of DualMap. Baselines as in its paper: cache affinity, least loaded, Min TTFT and Preble."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from pointsman_lab.results.claims import Claim, Measured, gain, holds, near, share_true, times
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies.rows import AS_WRITTEN, DUALMAP_BASELINES

claim = partial(Claim, paper="DualMap")
WORKLOADS = ("conversation", "tools")
LOADED_MIN = 0.5
"""Ratios of capacity count where one of both serves at least so many."""

FRESH = (
    "Every policy here sees its own placements before the next request is placed, and Min TTFT predicts seconds with a "
    "cost model that is learned online. With fresh load a choice among all instances loses little."
)
ENGINES = "8 simulated engines in place of 910B4; tool-and-agent is a reconstruction."


def _best_ratio(numbers: Numbers, model: str) -> Measured:
    """Of capacity, over the best baseline at the same rate."""
    found = {
        f"{workload} at {rate:g}/s": numbers.mean(key, AS_WRITTEN, "capacity", rate) / best
        for workload in WORKLOADS
        for key in [f"dualmap-{model}-{workload}"]
        for rate in numbers.studies[key].rates()
        for best in [_best(numbers, key, "capacity", rate)]
        if best > 0 and max(best, numbers.mean(key, AS_WRITTEN, "capacity", rate)) >= LOADED_MIN
    }
    where = max(found, key=lambda name: found[name], default="")
    return Measured(
        found.get(where, 0.0), f"at best {found[where]:.2f} times ({where})" if found else "none serves half"
    )


def _best(numbers: Numbers, study: str, what: str, rate: float | None = None) -> float:
    return max(_known(numbers, study, row, what, rate) for row in DUALMAP_BASELINES)


def _known(numbers: Numbers, study: str, row: str, what: str, rate: float | None) -> float:
    """Goodput is not searched where a policy serves next to nothing at the lowest rate: 0."""
    if what == "goodput" and row not in numbers.studies[study].goodput:
        return 0.0
    return numbers.mean(study, row, what, rate)


def _goodput_gain(numbers: Numbers) -> Measured:
    """The smallest, over the best baseline of each study. Without a goodput of its own it is below the lowest rate."""
    gains, texts = [], []
    for study in SEVEN:
        best = _best(numbers, study, "goodput")
        found = numbers.studies[study]
        below = AS_WRITTEN not in found.goodput
        own = min(found.rates()) if below else numbers.mean(study, AS_WRITTEN, "goodput")
        gains.append(own / best - 1 if best else 0.0)
        texts.append(f"{'below ' if below else ''}{gains[-1]:+.0%}")
    return Measured(min(gains), ", ".join(texts))


def _reduction(numbers: Numbers, what: str, studies: Sequence[str]) -> Measured:
    """Of a latency, against each baseline: the smallest and the largest."""
    found = [
        1 - numbers.mean(study, AS_WRITTEN, what) / numbers.mean(study, row, what)
        for study in studies
        for row in DUALMAP_BASELINES
    ]
    return Measured(min(found), f"{-max(found):+.0%} to {-min(found):+.0%}")


def _ablation(better: str, worse: str, what: str) -> Callable[[Numbers], Measured]:
    def measure(numbers: Numbers) -> Measured:
        key = "dualmap-ablation"
        fell = [
            1 - numbers.mean(key, better, what, rate) / numbers.mean(key, worse, what, rate)
            for rate in numbers.studies[key].rates()
        ]
        rates = [f"{-each:+.0%} at {rate:g}/s" for each, rate in zip(fell, numbers.studies[key].rates(), strict=True)]
        return Measured(fmean(fell), ", ".join(rates))

    return measure


def _pareto(numbers: Numbers) -> Measured:
    """Where no baseline has both a higher hit rate and a lower variation of load."""

    def is_undominated(key: str, rate: float) -> bool:
        return not any(
            numbers.mean(key, row, "hit_rate", rate) >= numbers.mean(key, AS_WRITTEN, "hit_rate", rate)
            and numbers.mean(key, row, "load_cv", rate) <= numbers.mean(key, AS_WRITTEN, "load_cv", rate)
            for row in DUALMAP_BASELINES
        )

    undominated = [is_undominated(key, rate) for key in SEVEN for rate in numbers.studies[key].rates()]
    return Measured(share_true(undominated), f"at {sum(undominated)} of {len(undominated)} points")


def _balance(numbers: Numbers) -> Measured:
    """Whether its load varies less than that of the policies with affinity."""
    lower = [
        [
            numbers.mean(key, AS_WRITTEN, "load_cv", rate) < numbers.mean(key, row, "load_cv", rate)
            for row in ("cache_affinity", "preble")
        ]
        for key in SEVEN
        for rate in numbers.studies[key].rates()
    ]
    return Measured(share_true(*lower), f"in {sum(map(sum, lower))} of {sum(map(len, lower))} comparisons")


def _ahead(numbers: Numbers, study: str) -> Measured:
    own, best = numbers.mean(study, AS_WRITTEN, "capacity"), _best(numbers, study, "capacity")
    return Measured(float(own > best), f"capacity {own:.3f} against {best:.3f}")


def _share_of_bound(numbers: Numbers, workload: str) -> Measured:
    key = f"dualmap-7b-{workload}"
    share = numbers.mean(key, AS_WRITTEN, "hit_share_of_bound", min(numbers.studies[key].rates()))
    return Measured(share, f"{share:.1%}")


def _key_share(numbers: Numbers, names: Sequence[str]) -> Measured:
    found = numbers.measurements["dualmap-key-lengths"]
    written, observed = (sum(found[f"{name.format(limit)}"] for name in names) for limit in ("2 per n", "1 per n"))
    return Measured(observed, f"{observed:.0%} with 1/n, {written:.0%} with 2/n")


def _tool_keys(numbers: Numbers) -> Measured:
    """The largest distance of a peak from the paper's share."""
    found = numbers.measurements["dualmap-key-lengths"]
    here = {blocks: found[f"tools, 1 per n, {blocks} blocks"] for blocks in ("2", "5 to 6", "12 to 13")}
    farthest = max(abs(share - paper) for share, paper in zip(here.values(), (0.45, 0.15, 0.38), strict=True))
    return Measured(farthest, " / ".join(f"{share:.0%}" for share in here.values()) + " with 1/n")


def _elastic(numbers: Numbers) -> Measured:
    """Windows in which it serves at least as many on time as every baseline."""
    points = {point.row: point.windows for point in numbers.studies["elasticity"].points}
    own = points[AS_WRITTEN]
    ahead = [all((own[at] or 0.0) >= (points[row][at] or 0.0) for row in DUALMAP_BASELINES) for at in range(len(own))]
    return Measured(share_true(ahead), f"in {sum(ahead)} of {len(ahead)} phases")


def _overhead(numbers: Numbers) -> Measured:
    found = numbers.measurements["dualmap-scheduler-overhead"]
    sizes = (8, 16, 32)
    share = max(found[f"{n} instances, us"] / (1000 * found[f"{n} instances, TTFT P50 ms"]) for n in sizes)
    text = ", ".join(f"{found[f'{n} instances, us']:.0f}" for n in sizes)
    return Measured(float(share < 0.01), f"{text} us at 8, 16 and 32 instances: {share:.2%} of the TTFT P50 at most")


def _two_enough(numbers: Numbers, *studies: str) -> Measured:
    """In each study: whether one candidate serves fewer than two, and whether no larger number serves more."""
    judged, texts = [], []
    for study in studies:
        one, two, *more = (numbers.mean(study, row, "capacity") for row in numbers.studies[study].rows())
        judged.append([one < two, max(more) <= two + SAME])
        texts.append(f"{study.removeprefix(CANDIDATES)}: " + ", ".join(f"{each:.3f}" for each in (one, two, *more)))
    return Measured(share_true(*judged), "; ".join(texts))


def _rebalancing_helps(numbers: Numbers) -> Measured:
    gains = {
        called: 100
        * (numbers.mean(key, AS_WRITTEN, "capacity") - numbers.mean(key, f"{AS_WRITTEN}, no rebalancing", "capacity"))
        for called, key in (
            ("fresh load", "rebalancing-fresh"),
            ("0.5 s old", "rebalancing-lag"),
            ("slow instance", "rebalancing-slow"),
            ("two hot prefixes", "rebalancing-hot"),
        )
    }
    helped = [value > 1 for value in gains.values()]
    return Measured(
        share_true(helped), ", ".join(f"{called} {value:+.1f}" for called, value in gains.items()) + " points"
    )


SEVEN = tuple(f"dualmap-7b-{workload}" for workload in WORKLOADS)
LATENCY = tuple(f"dualmap-latency-{workload}" for workload in WORKLOADS)
CANDIDATES = "dualmap-candidates-"
SAME = 0.01
"""Of capacity, which other seeds turn round."""

CLAIMS = (
    claim(
        place="abstract, Figure 3 (7B)",
        says="capacity over the best baseline",
        reported="up to 2.25 times",
        conditions=f"TTFT SLO 5 s, 1M tokens of cache, prompts up to 20,480 tokens. {ENGINES}",
        measure=partial(_best_ratio, model="7b"),
        rule=times(2.25),
        why=FRESH,
    ),
    claim(
        place="Figure 3 (14B)",
        says="capacity over the best baseline",
        reported="up to 2.25 times",
        conditions="As above, 0.5M tokens of cache, prompts up to 10,240 tokens; a cost model of Qwen2.5-14B on one 910B4.",
        measure=partial(_best_ratio, model="14b"),
        rule=times(2.25),
        why=FRESH,
    ),
    claim(
        place="Figure 3 (7B)",
        says="goodput over the best baseline",
        reported="+14% to +48%",
        conditions="Highest rate with 90% on time: conversation, tools.",
        measure=_goodput_gain,
        rule=gain(0.14),
        why=FRESH,
    ),
    claim(
        place="Figure 1",
        says="no baseline has a higher hit rate and a lower variation of load",
        reported="on the Pareto front",
        conditions="7B, two rates, both workloads.",
        measure=_pareto,
        rule=holds,
        why="Past saturation the less loaded of two late candidates is taken, which costs hits.",
    ),
    claim(
        place="Figure 4, P50",
        says="lower TTFT than each baseline",
        reported="-55% to -97%",
        conditions="Whole answers; conversation 3/s, tools 6/s; the table tells who keeps TTFT and TBT there.",
        measure=partial(_reduction, what="ttft_p50_s", studies=LATENCY),
        rule=gain(0.55),
        why=FRESH,
    ),
    claim(
        place="Figure 4, P90",
        says="lower TTFT than each baseline",
        reported="-82% to -97%",
        conditions="As above.",
        measure=partial(_reduction, what="ttft_p90_s", studies=LATENCY),
        rule=gain(0.82),
        why=FRESH,
    ),
    claim(
        place="Figure 4, E2E P50",
        says="lower end-to-end latency than each baseline",
        reported="lower throughout",
        conditions="As above.",
        measure=partial(_reduction, what="e2e_p50_s", studies=LATENCY),
        rule=gain(0.05),
        why=FRESH,
    ),
    claim(
        place="Figure 5 (ablation)",
        says="SLO-aware choice within the pair over the lowest TTFT of the pair, P50",
        reported="-23.5%",
        conditions="14B, conversation, without rebalancing.",
        measure=_ablation(f"{AS_WRITTEN}, no rebalancing", f"{AS_WRITTEN}, min-ttft", "ttft_p50_s"),
        rule=gain(0.235),
        why="Two candidates that are late: the less loaded one computes the prefix again, and everybody behind waits.",
    ),
    claim(
        place="Figure 5 (ablation)",
        says="rebalancing within the pair, P90",
        reported="-11.3%",
        conditions="14B, conversation.",
        measure=_ablation(AS_WRITTEN, f"{AS_WRITTEN}, no rebalancing", "ttft_p90_s"),
        rule=gain(0.113),
        why="A placement that sees fresh load has already compared both of the pair.",
    ),
    claim(
        place="Figure 6a",
        says="conversation: keys of two blocks",
        reported="95%",
        conditions="512-token blocks, n = 8; shares of 3,000 requests.",
        measure=partial(_key_share, names=("conversation, {}, 2 blocks",)),
        rule=near(0.95, within=0.1, direction=0.25),
    ),
    claim(
        place="Figure 6b",
        says="tools: keys of 2, of 5 to 6, and of 12 to 13 blocks",
        reported="45 / 15 / 38%",
        conditions="The reconstruction has the paper's shares of hot prefixes, so this tests the hotness tree alone.",
        measure=_tool_keys,
        rule=near(0.0, within=0.1, direction=0.25),
        why="The key of a hot prefix grows block by block, so that a fifth of the requests have keys in between.",
    ),
    claim(
        place="Figures 8 and 11",
        says="fewer hot instances: load varies less than with cache affinity and with Preble",
        reported="throughout",
        conditions="Variation of pending tokens over time, 7B, two rates.",
        measure=_balance,
        rule=holds,
        why="Preble balances about as well; see the load CV below.",
    ),
    claim(
        place="Figure 10",
        says="conversation: hit rate as a share of one infinite cache's",
        reported="62.5%",
        conditions="7B, at 6/s.",
        measure=partial(_share_of_bound, workload="conversation"),
        rule=near(0.625, within=0.1, direction=0.25),
        why="Our cap of the prompts leaves other sharing than the paper's.",
    ),
    claim(
        place="Figure 10",
        says="tools: hit rate as a share of one infinite cache's",
        reported="96.4%",
        conditions="7B, at 12/s; the reconstruction shares less beyond its two hot prefixes.",
        measure=partial(_share_of_bound, workload="tools"),
        rule=near(0.964, within=0.1, direction=0.25),
        why="The reconstruction shares less beyond its two hot prefixes.",
    ),
    claim(
        place="Figure 12",
        says="serves most on time while the fleet goes from 4 to 8 and back to 4",
        reported="throughout",
        conditions="Tools, sizes scripted; at the same sizes the baselines of the paper.",
        measure=_elastic,
        rule=holds,
        why=FRESH,
    ),
    claim(
        place="Figure 13a",
        says="serves more than the best baseline at 32 instances",
        reported="ahead from 8 to 32",
        conditions="Conversation, 32 instances at 27/s; the paper reports goodput.",
        measure=partial(_ahead, study="dualmap-32-instances"),
        rule=holds,
        why=FRESH,
    ),
    claim(
        place="Figure 13b",
        says="the scheduler's time is negligible",
        reported="negligible",
        conditions="Microseconds of a decision in Python, with all bookkeeping, by the clock of the machine, so that "
        "another run gives another number; below 1% of the TTFT counts as negligible.",
        measure=_overhead,
        rule=holds,
    ),
    claim(
        place="Figure 15",
        says="two candidates suffice: one is worse, more are not better",
        reported="d = 2",
        conditions="Capacity with d of 1, 2, 3 and 4, fresh load: conversation 6.5/s, tools 13/s.",
        measure=lambda numbers: _two_enough(numbers, f"{CANDIDATES}conversation-fresh", f"{CANDIDATES}tools-fresh"),
        rule=holds,
        why="Past saturation a second candidate costs hits: on tools one candidate serves more. More than two cost more.",
    ),
    claim(
        place="Figure 15, old load",
        says="two candidates suffice",
        reported="d = 2",
        conditions="As above, conversation, load information 0.5 s old.",
        measure=lambda numbers: _two_enough(numbers, f"{CANDIDATES}conversation-stale"),
        rule=holds,
        why="Herding limits the gain of more candidates, and does not always end it at two.",
    ),
    claim(
        place="3.3",
        says="moving requests within the pair resolves hotspots",
        reported="no number",
        conditions="Capacity with and without, four situations.",
        measure=_rebalancing_helps,
        rule=holds,
        why="With fresh load the placement has compared both of the pair already; a third instance is never asked.",
    ),
)
