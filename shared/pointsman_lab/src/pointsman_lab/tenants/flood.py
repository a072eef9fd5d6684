"""What a flooding tenant does to others: TTFT of well-behaved tenants without it; beside it while it keeps to the limits;
while it floods under the same limits; in the class `batch` besides; in that class without limits; and under fair ordering
alone. The difference that flooding makes is that to `behaved`, of which each round has two."""

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant
from pointsman.simulation.metrics import percentile
from pointsman_lab.tenants.load import Sample, Traffic

TENANTS = 4
RATE = 0.6
FLOOD = Tenant("flood")
SETTLE_SECONDS = 2.0

_WELL = [
    Traffic(tenant=f"tenant-{number}", rate=RATE, prompt_tokens=3_000, output_tokens=16, shared_tokens=1_024)
    for number in range(1, TENANTS + 1)
]
_ALLOWED = 1.0
_FLOOD_RATE = 20.0
_FOR_ALL = TenantPolicy(requests_per_second=_ALLOWED, concurrency=2)
_LIMITS = TenantPolicies(default=_FOR_ALL)
_BATCH = msgspec.structs.replace(_FOR_ALL, priority="batch")
_INTERACTIVE = msgspec.structs.replace(_FOR_ALL, priority="interactive")

BEHAVED = "behaved"
LIMITED = "limited"


class Variant(msgspec.Struct, frozen=True):
    """`rate`: of the flooding tenant."""

    name: str
    rate: float
    policies: TenantPolicies


_BEHAVED = Variant(BEHAVED, 0.9 * _ALLOWED, _LIMITS)
VARIANTS = (
    Variant("alone", 0.0, _LIMITS),
    _BEHAVED,
    Variant(LIMITED, _FLOOD_RATE, _LIMITS),
    _BEHAVED,
    Variant("limited, batch", _FLOOD_RATE, TenantPolicies(default=_INTERACTIVE, tenants={FLOOD: _BATCH})),
    Variant(
        "batch",
        _FLOOD_RATE,
        TenantPolicies(default=TenantPolicy(priority="interactive"), tenants={FLOOD: TenantPolicy(priority="batch")}),
    ),
    Variant("fair only", _FLOOD_RATE, TenantPolicies()),
)


class FloodRun(msgspec.Struct, kw_only=True):
    """Of the well-behaved tenants; wall seconds. `flood_served`: requests of the flood that were answered."""

    variant: str
    requests: int
    refused: int
    ttft_p50: float | None
    ttft_p90: float | None
    flood_sent: int
    flood_served: int


class FloodRound(msgspec.Struct, kw_only=True):
    """`behaved_p90`: of both runs. `p90_ratios`: TTFT P90 of a variant to that."""

    runs: list[FloodRun]
    behaved_p90: float
    p90_ratios: dict[str, float]


def traffic_of(variant: Variant) -> list[Traffic]:
    if not variant.rate:
        return _WELL
    flood = Traffic(tenant=FLOOD, rate=variant.rate, prompt_tokens=1_500, output_tokens=16, hangs_up=True)
    return [*_WELL, flood]


def round_of(samples: Sequence[tuple[Variant, Sequence[Sample]]]) -> FloodRound:
    runs = [_run_of(variant, taken) for variant, taken in samples]
    behaved = percentile([wait for variant, taken in samples if variant.name == BEHAVED for wait in _waits(taken)], 90)
    behaved = behaved or 0.0
    ratios = {run.variant: round(run.ttft_p90 / behaved, 3) for run in runs if run.ttft_p90 and behaved}
    ratios.pop(BEHAVED, None)
    return FloodRound(runs=runs, behaved_p90=behaved, p90_ratios=ratios)


def _run_of(variant: Variant, samples: Sequence[Sample]) -> FloodRun:
    well = [sample for sample in samples if sample.tenant != FLOOD]
    flood = [sample for sample in samples if sample.tenant == FLOOD]
    return FloodRun(
        variant=variant.name,
        requests=len(well),
        refused=sum(sample.status != HTTPStatus.OK for sample in well),
        ttft_p50=percentile(_waits(samples), 50),
        ttft_p90=percentile(_waits(samples), 90),
        flood_sent=len(flood),
        flood_served=sum(sample.ttft is not None for sample in flood),
    )


def _waits(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft for sample in samples if sample.tenant != FLOOD and sample.ttft is not None]
