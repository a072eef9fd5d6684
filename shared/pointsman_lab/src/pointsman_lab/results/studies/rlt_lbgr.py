"""RLT and LBGR (Randomization Boosts KV Caching): randomised eviction and routing that learns, at the paper's load and at
equal eviction."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pointsman_lab.results.claims import Claim, Measured, gain, holds, share_true, times
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies.rows import Workloads, rows
from pointsman_lab.results.study import OURS, Conditions, Metric, Row, Study

claim = partial(Claim, paper="RLT and LBGR")
CACHE_AWARE = ("sticky_least_loaded.imbalance_tokens_max=101568", "sticky_least_loaded.hit_share_min=0.5")
"""After SGLang's cache-aware router: longest match of at least half of a prompt, until one instance has 32 requests
more than another (here 32 mean prompts)."""
PAPER_DECAY = 0.63
"""Seconds until 31/32 each 20 ms has come down to 1/e."""
DECAYS = (2.0, 20.0)
"""Besides the paper's and the default of 10 s."""
POOL: Conditions = {"instances": 4, "kv_capacity_tokens": 200_000, "prefill_only": False}
METRICS: tuple[Metric, ...] = ("hit_rate", "tokens_per_s", "load_cv", "ttft_p50_s", "ttft_p90_s", "e2e_p50_s")
LOADS = {
    "lbgr-load": ("gsp_classes", (12.0, 15.0), "half of each prompt shared"),
    "lbgr-shared-30": ("gsp_classes_30", (12.0,), "30% of each prompt shared"),
    "lbgr-shared-90": ("gsp_classes_90", (12.0,), "90% of each prompt shared"),
}
"""As the paper's code makes them."""
IN_TURN_KEY = "lbgr-in-turn"
IN_TURN: Conditions = {"kv_capacity_tokens": 120_000, "prefill_only": True}
"""The worst order for LRU: 128 groups of mixed lengths in turn, which need a little more."""
LBGR = ("lbgr", "lbgr, decay as published", "lbgr, to the letter")


def studies(workloads: Workloads) -> Iterable[Study]:
    for key, (name, rates, what) in LOADS.items():
        yield Study(
            key=key,
            title=f"Eviction and learned routing, {what}",
            about=ABOUT,
            source=workloads.generated(name, 4096),
            rows=[row for eviction in ("lru", "rlt") for row in _compared(eviction)],
            rates=rates,
            conditions=POOL,
            metrics=METRICS,
        )
    yield Study(
        key=IN_TURN_KEY,
        title="Eviction, groups in turn, caches a little too small",
        about=ABOUT_IN_TURN,
        source=workloads.generated("gsp_half_shared_round_robin", 4096),
        rows=[
            row
            for eviction in ("lru", "rlt")
            for row in (*_baselines(eviction), *rows(("lbgr", OURS), note=eviction, eviction=eviction))
        ],
        rates=(7.5,),
        conditions={**POOL, **IN_TURN},
        metrics=METRICS,
    )
    yield Study(
        key="lbgr-decay",
        title="LBGR by the decay of its load",
        about="As in the paper's Figure 14. 0.63 s is the paper's decay, 10 s the default.",
        source=workloads.generated("gsp_classes", 4096),
        rows=[
            row
            for decay in sorted((*DECAYS, PAPER_DECAY, 10.0))
            for row in rows(("lbgr",), note=f"{decay:g} s", settings=(f"lbgr.decay_s={decay}",))
        ],
        rates=(12.0, 15.0),
        conditions=POOL,
        metrics=METRICS,
    )


ABOUT = (
    "The load of the paper's code: 128 groups of 32 prompts, lengths of 512 to 8,192 in five classes, answers of four "
    "tokens, 12 requests a second; 4 instances with 200k tokens of cache."
)
ABOUT_IN_TURN = (
    "128 groups in turn, the worst order for LRU; prompts of 1,024 to 8,192 tokens, half of them shared, answers of one token; 4 instances with "
    "120k tokens of cache, a little less than the groups of one need."
)


def _compared(eviction: str) -> list[Row]:
    decay = f"lbgr.decay_s={PAPER_DECAY}"
    letter = ("lbgr.as_published=true", decay)
    return [
        *_baselines(eviction),
        *rows(("lbgr",), note=eviction, eviction=eviction),
        *rows(("lbgr",), note=f"decay as published, {eviction}", settings=(decay,), eviction=eviction),
        *rows(("lbgr",), note=f"to the letter, {eviction}", settings=letter, eviction=eviction),
        *rows((OURS,), note=eviction, eviction=eviction),
    ]


def _baselines(eviction: str) -> list[Row]:
    return [
        *rows(("round_robin",), note=eviction, eviction=eviction),
        *rows(("sticky_least_loaded",), note=f"cache-aware, {eviction}", settings=CACHE_AWARE, eviction=eviction),
    ]


LEAST = 0.01
"""A ratio to a hit rate below this says nothing."""
CACHE_AWARE_ROW, ROUND_ROBIN = "sticky_least_loaded, cache-aware", "round_robin"


@dataclass(frozen=True)
class Versus:
    """The largest ratio of all loads and rates, as in "up to"; of LBGR the best of its three rows."""

    metric: Metric
    eviction: str
    baseline: str
    smaller: bool = True

    def __call__(self, numbers: Numbers) -> Measured:
        points = [
            (key, rate) for key, (_, rates, _) in LOADS.items() for rate in rates if self._tells(numbers, key, rate)
        ]
        best, name, key, rate = max(
            (self._ratio(numbers, key, row, rate), row, key, rate) for key, rate in points for row in LBGR
        )
        usual = [max(self._ratio(numbers, key, row, rate) for row in LBGR) for key, rate in points]
        return Measured(best, f"{best:.2f} times ({name}, {key} at {rate:g}/s); least {min(usual):.2f}")

    def _tells(self, numbers: Numbers, key: str, rate: float) -> bool:
        return self.metric != "hit_rate" or numbers.mean(key, self.baseline, self.metric, rate) >= LEAST

    def _ratio(self, numbers: Numbers, key: str, row: str, rate: float) -> float:
        ours = numbers.mean(key, f"{row}, {self.eviction}", self.metric, rate)
        theirs = numbers.mean(key, self.baseline, self.metric, rate)
        return theirs / ours if self.smaller else ours / theirs


def _both(first: Versus, second: Versus) -> Callable[[Numbers], Measured]:
    """The first is judged."""

    def measure(numbers: Numbers) -> Measured:
        one, other = first(numbers), second(numbers)
        return Measured(one.value, f"{one.text}; over {second.baseline} at most {other.value:.2f} times")

    return measure


def _more_throughput(numbers: Numbers) -> Measured:
    measured = Versus("tokens_per_s", "rlt", f"{CACHE_AWARE_ROW}, lru", smaller=False)(numbers)
    return Measured(measured.value - 1, measured.text)


def _rlt_hits(numbers: Numbers) -> Measured:
    def hits(key: str, row: str, eviction: str) -> float:
        return numbers.mean(key, f"{row}, {eviction}", "hit_rate")

    loads, policies = (*LOADS, IN_TURN_KEY), (ROUND_ROBIN, CACHE_AWARE_ROW, LBGR[0])
    kept = [[hits(key, row, "rlt") >= hits(key, row, "lru") for row in policies] for key in loads]
    most = max(hits(key, row, "rlt") / max(LEAST, hits(key, row, "lru")) for key in loads for row in policies)
    text = f"in {sum(map(sum, kept))} of {len(loads) * len(policies)} pairs; {most:.2f} times at most"
    return Measured(share_true(*kept), text)


def _slower_decay(numbers: Numbers) -> Measured:
    """From the paper's decay on, each slower one has a higher TTFT."""
    slower = [f"lbgr, {decay:g} s" for decay in sorted((PAPER_DECAY, *DECAYS, 10.0)) if decay >= PAPER_DECAY]
    values = {rate: [numbers.mean("lbgr-decay", row, "ttft_p50_s", rate) for row in slower] for rate in (12.0, 15.0)}
    worse = [[after > before for before, after in pairwise(row)] for row in values.values()]
    text = "; ".join(f"{rate:g}/s: " + ", ".join(f"{one:.2f}" for one in row) for rate, row in values.items())
    return Measured(share_true(*worse), f"P50 of the TTFT from 0.63 to 20 s, {text} s")


APPROXIMATE = (
    "SGLang's router guesses what engines hold from what it sent there, without evictions. The cache-aware rule here "
    "knows it from KV events, and so keeps most of the hits."
)
AT_LOAD = (
    "The paper's load with simulated engines; the best of LBGR's rows. The rows at equal eviction show LBGR's part."
)
LRU_ROW, RLT_ROW = f"{CACHE_AWARE_ROW}, lru", f"{CACHE_AWARE_ROW}, rlt"
RR_LRU = f"{ROUND_ROBIN}, lru"

CLAIMS = (
    claim(
        place="abstract",
        says="LBGR with RLT: a higher hit rate than the state of the art",
        reported="up to 6.92 times",
        conditions=f"{AT_LOAD} Where the baseline hits at least {LEAST:.0%}.",
        measure=_both(
            Versus("hit_rate", "rlt", LRU_ROW, smaller=False), Versus("hit_rate", "rlt", RR_LRU, smaller=False)
        ),
        rule=times(6.92),
        why=APPROXIMATE,
    ),
    claim(
        place="abstract",
        says="LBGR with RLT: lower latency than the state of the art",
        reported="up to 11.96 times",
        conditions="P50 end to end.",
        measure=_both(Versus("e2e_p50_s", "rlt", LRU_ROW), Versus("e2e_p50_s", "rlt", RR_LRU)),
        rule=times(11.96),
        why=APPROXIMATE,
    ),
    claim(
        place="abstract",
        says="LBGR with RLT: a lower TTFT than the state of the art",
        reported="up to 14.06 times",
        conditions="P50.",
        measure=_both(Versus("ttft_p50_s", "rlt", LRU_ROW), Versus("ttft_p50_s", "rlt", RR_LRU)),
        rule=times(14.06),
        why=APPROXIMATE,
    ),
    claim(
        place="abstract",
        says="LBGR with RLT: more throughput than the state of the art",
        reported="up to 77.4%",
        conditions="Prompt and output tokens a second.",
        measure=_more_throughput,
        rule=gain(0.774),
        why="Arrivals do not wait for answers; up to saturation everybody serves what arrives.",
    ),
    claim(
        place="section 5",
        says="LBGR with LRU: lower latency than cache-aware routing with LRU",
        reported="up to 9.98 times",
        conditions="Equal eviction; P50 end to end.",
        measure=Versus("e2e_p50_s", "lru", LRU_ROW),
        rule=times(9.98),
        why=APPROXIMATE,
    ),
    claim(
        place="section 5",
        says="LBGR with RLT: lower latency than cache-aware routing with RLT",
        reported="7 to 10 times",
        conditions="Equal eviction; P50 end to end.",
        measure=Versus("e2e_p50_s", "rlt", RLT_ROW),
        rule=times(7.0),
        why=APPROXIMATE,
    ),
    claim(
        place="section 4",
        says="RLT keeps more hits than LRU, whatever the routing",
        reported="O(log n) against Omega(n) of the best",
        conditions="Round robin, cache-aware and LBGR at three loads of the paper, and at groups in turn with a cache that is a "
        "little too small, which is not the paper's. The bounds themselves are tests.",
        measure=_rlt_hits,
        rule=holds,
        why="Where the prefixes of an instance fit into its cache, RLT drops some that LRU keeps (90% shared).",
    ),
    claim(
        place="figure 14",
        says="slower decay of the load is worse",
        reported="0.63 s is best",
        conditions="LBGR with the cost model, LRU, at 12 and 15 a second.",
        measure=_slower_decay,
        rule=holds,
        why="Past saturation queues last longer than 0.63 s, and a load that is forgotten draws more.",
    ),
    claim(
        place="theorems 4 and 6",
        says="RLT is within O(log n) of the best eviction, LRU only within O(n)",
        reported="theorems",
        conditions="For any order of requests.",
        why="A run cannot show a bound. Tests have the worst orders: tests/simulation/test_eviction_rlt.py.",
    ),
)
