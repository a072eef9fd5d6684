"""What a cache beyond one instance gives: slower tiers, prefixes fetched from other instances, and split pools."""

from collections.abc import Iterable, Mapping, Sequence

from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_lab.results.claims import Claim, Measured, gain, holds, share_true
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.split_pools import split_pools
from pointsman_lab.results.studies.rows import AS_LIVE, LIVE_DEFAULT, Workloads, called, rows, short, tuned
from pointsman_lab.results.study import OURS, SEEDS, Conditions, Measurement, Row, Study

DEVICE_TOKENS = 250_000
HOST_TOKENS = 1_500_000
"""196 GB for the 8-billion model."""
TIERS: Mapping[str, Conditions] = {
    "no host tier": {},
    "host tier, unseen": {"host_cache_tokens": HOST_TOKENS, "tiers_known": False},
    "host tier": {"host_cache_tokens": HOST_TOKENS},
}

MEASUREMENTS = (Measurement(key="split-pools", measure=split_pools),)


def studies(workloads: Workloads) -> Iterable[Study]:
    yield _host_tier(workloads)
    yield from _fetches(workloads)
    yield from _copies(workloads)


def _host_tier(workloads: Workloads) -> Study:
    return Study(
        key="host-tier-conversation",
        title="A host tier behind caches of 250k tokens, conversation",
        about=(
            "Each engine keeps 1.5 million tokens in host memory and loads them back at 20 GB/s. Unseen: the engine "
            "uses them, the scheduler does not know of them."
        ),
        source=workloads.conversation(),
        rows=[row for note, tier in TIERS.items() for row in _with_tier(note, tier)],
        rates=(7.0,),
        conditions={**AS_LIVE, "kv_capacity_tokens": DEVICE_TOKENS},
        metrics=("hit_rate", "loaded_share", "ttft_p50_s", "ttft_p90_s", "prediction_error_p50_s"),
    )


def _with_tier(note: str, tier: Conditions) -> list[Row]:
    return [
        *rows((OURS, "min_ttft"), note=note, **tier),
        tuned("dualmap", note=note, **tier),
        *rows((OURS,), *LIVE_DEFAULT, note, **tier),
    ]


# --- Prefixes fetched from other instances ---

BYTES_PER_TOKEN = PROFILES[DEFAULT_PROFILE].kv_bytes_per_token
GB_PER_S = (0.1, 1.0, 10.0)
COMPUTED = "no fetches"
DIRECT, ENGINE = "direct", "by the engines"
FETCH_RATES: Mapping[str, tuple[float, ...]] = {"conversation": (4.0, 5.0), "tools": (8.0, 10.0)}
"""Below saturation, as in the study of Mooncake's schedulers."""


def _fetches(workloads: Workloads) -> Iterable[Study]:
    for source in (workloads.conversation(2000), workloads.tools(2000)):
        yield Study(
            key=f"fetches-{short(source)}",
            title=f"Prefixes fetched from other instances, {called(source)}",
            about=(
                "A source gives at so many GB/s, one fetch after the other. Direct: a fetch waits for neither engine, as "
                "Mooncake's Messenger. By the engines: it is a request to each of them, as with vLLM's NixlConnector."
            ),
            source=source,
            rows=[*_fetching("min_ttft", GB_PER_S), *_fetching(OURS, GB_PER_S[-1:], *LIVE_DEFAULT)],
            rates=FETCH_RATES[short(source)],
            metrics=(
                "fetched_share",
                "ttft_mean_s",
                "ttft_p50_s",
                "ttft_p90_s",
                "ttft_p99_s",
                "prediction_error_p90_s",
            ),
        )


def _fetching(policy: str, speeds: Sequence[float], ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    def at(note: str, gb_per_s: float = 0.0, path: str = "direct") -> list[Row]:
        rate = gb_per_s * 1e9 / BYTES_PER_TOKEN
        return rows((policy,), ordering, admission, note, transfer_tokens_per_s=rate, fetch_path=path, copies=False)

    found = at(COMPUTED)
    for gb_per_s in speeds:
        found += at(fetched(DIRECT, gb_per_s), gb_per_s)
    return found + at(fetched(ENGINE, GB_PER_S[-1]), GB_PER_S[-1], "engine")


def fetched(path: str, gb_per_s: float) -> str:
    return f"{path}, {gb_per_s:g} GB/s"


WHEN_NEEDED, AHEAD = "fetched when needed", "copied ahead"


def _copies(workloads: Workloads) -> Iterable[Study]:
    by_engines: Conditions = {"transfer_tokens_per_s": GB_PER_S[-1] * 1e9 / BYTES_PER_TOKEN, "fetch_path": "engine"}
    source = workloads.generated("two_hot_prefixes", 2000)
    for key, rate, policies in (
        ("copies-two-hot-prefixes", 48.0, ("fcfs", "none")),
        ("copies-two-hot-prefixes-default", 80.0, LIVE_DEFAULT),
    ):
        yield Study(
            key=key,
            title=f"Hot prefixes copied ahead of need, {called(source)}, {', '.join(policies)}",
            about=(
                "Engines fetch prefixes from each other at 10 GB/s. A prefix that at least one in n of all arrivals share "
                "is copied to the instances that lack it, after the first token of a request that carries it."
            ),
            source=source,
            rows=[
                *rows((OURS,), *policies, WHEN_NEEDED, copies=False, **by_engines),
                *rows((OURS,), *policies, AHEAD, copies=True, **by_engines),
            ],
            rates=(rate,),
            seeds=SEEDS,
            conditions=AS_LIVE,
            metrics=("copies", "fetched_share", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
        )


def _alone(note: str) -> str:
    """Name of the row of `min_ttft`, where rows differ in admission."""
    return f"min_ttft, {note} + fcfs + none"


def _fetch_points() -> list[tuple[str, float]]:
    return [(f"fetches-{workload}", rate) for workload, rates in FETCH_RATES.items() for rate in rates]


def _global_over_local(numbers: Numbers) -> Measured:
    saved, texts = [], []
    for key, rate in _fetch_points():
        alone = numbers.mean(key, _alone(COMPUTED), "ttft_mean_s", rate)
        together = numbers.mean(key, _alone(fetched(DIRECT, GB_PER_S[-1])), "ttft_mean_s", rate)
        saved.append(1 - together / alone)
        texts.append(f"{key.removeprefix('fetches-')} {rate:g}/s: {-saved[-1]:+.0%}")
    return Measured(min(saved), ", ".join(texts))


def _by_bandwidth(numbers: Numbers) -> Measured:
    falls, texts = [], []
    for key, rate in _fetch_points():
        notes = [COMPUTED, *(fetched(DIRECT, gb_per_s) for gb_per_s in GB_PER_S)]
        means = [numbers.mean(key, _alone(note), "ttft_mean_s", rate) for note in notes]
        falls.append([means == sorted(means, reverse=True) and means[0] > means[-1]])
        texts.append(f"{key.removeprefix('fetches-')} {rate:g}/s " + ", ".join(f"{mean:.2f}" for mean in means))
    return Measured(share_true(*falls), "mean TTFT without, at 0.1, 1 and 10 GB/s: " + "; ".join(texts) + " s")


CLAIMS = (
    Claim(
        paper="Mooncake, transfers",
        place="Figure 5, 4.2",
        says="mean TTFT of scheduling with transfers between instances, against caches of their own",
        reported="-14%",
        conditions="Ours: `min_ttft`, 8 instances, prefill only, each source gives 10 GB/s; below saturation; the least saving counts.",
        measure=_global_over_local,
        rule=gain(0.14),
        why="What is saved depends on the load: little before the caches' holders have queues.",
    ),
    Claim(
        paper="Mooncake, transfers",
        place="Figure 13",
        says="the faster the network, the lower the TTFT",
        reported="curve",
        conditions="Ours: bandwidth of each source, 8 instances.",
        measure=_by_bandwidth,
        rule=holds,
        why="See the numbers.",
    ),
)
