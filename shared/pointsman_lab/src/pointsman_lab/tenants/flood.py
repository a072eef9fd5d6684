"""What a flooding tenant does to others: TTFT of well-behaved tenants without the flood, with it under a limit, with it in
the class `batch`, and with it under fair ordering alone. Each round has all of them, and the time without the flood
before and after the limited ones."""

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant
from pointsman_lab.tenants.load import Sample, Traffic, quantile

TENANTS = 4
RATE = 0.6
FLOOD = Tenant("flood")
SETTLE_SECONDS = 2.0

_WELL = [
    Traffic(tenant=f"tenant-{number}", rate=RATE, prompt_tokens=3_000, output_tokens=16, shared_tokens=1_024)
    for number in range(1, TENANTS + 1)
]
_FLOOD = Traffic(tenant=FLOOD, rate=20.0, prompt_tokens=1_500, output_tokens=16, hangs_up=True)
_LIMITED = TenantPolicy(requests_per_second=0.5, concurrency=1)
_INTERACTIVE = TenantPolicies(default=TenantPolicy(priority="interactive"))


ALONE = "alone"
LIMITED = "limited"


class Variant(msgspec.Struct, frozen=True):
    name: str
    floods: bool
    policies: TenantPolicies


_ALONE = Variant(ALONE, False, TenantPolicies())


VARIANTS = (
    _ALONE,
    Variant(LIMITED, True, TenantPolicies(tenants={FLOOD: _LIMITED})),
    Variant(
        "limited batch",
        True,
        msgspec.structs.replace(_INTERACTIVE, tenants={FLOOD: msgspec.structs.replace(_LIMITED, priority="batch")}),
    ),
    _ALONE,
    Variant("batch", True, msgspec.structs.replace(_INTERACTIVE, tenants={FLOOD: TenantPolicy(priority="batch")})),
    Variant("fair only", True, TenantPolicies()),
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
    """`alone_p90`: of all runs without the flood. `p90_ratios`: TTFT P90 of a variant to that."""

    runs: list[FloodRun]
    alone_p90: float
    p90_ratios: dict[str, float]


def traffic_of(variant: Variant) -> list[Traffic]:
    return [*_WELL, _FLOOD] if variant.floods else _WELL


def round_of(samples: Sequence[tuple[Variant, Sequence[Sample]]]) -> FloodRound:
    runs = [_run_of(variant, taken) for variant, taken in samples]
    alone = quantile((wait for variant, taken in samples if not variant.floods for wait in _waits(taken)), 0.9) or 0.0
    ratios = {run.variant: round(run.ttft_p90 / alone, 3) for run in runs if run.flood_sent and run.ttft_p90 and alone}
    return FloodRound(runs=runs, alone_p90=alone, p90_ratios=ratios)


def _run_of(variant: Variant, samples: Sequence[Sample]) -> FloodRun:
    well = [sample for sample in samples if sample.tenant != FLOOD]
    flood = [sample for sample in samples if sample.tenant == FLOOD]
    return FloodRun(
        variant=variant.name,
        requests=len(well),
        refused=sum(sample.status != HTTPStatus.OK for sample in well),
        ttft_p50=quantile(_waits(samples), 0.5),
        ttft_p90=quantile(_waits(samples), 0.9),
        flood_sent=len(flood),
        flood_served=sum(sample.ttft is not None for sample in flood),
    )


def _waits(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft for sample in samples if sample.tenant != FLOOD and sample.ttft is not None]
