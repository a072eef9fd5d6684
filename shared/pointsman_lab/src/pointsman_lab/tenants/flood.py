"""What a flooding tenant does to others: TTFT of well-behaved tenants without the flood, with it under a limit, with it in
the class `batch`, and with it under fair ordering alone. All in each round, so that rounds compare alike."""

from collections.abc import Sequence

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
_FLOOD = Traffic(tenant=FLOOD, rate=20.0, prompt_tokens=1_500, output_tokens=16)
_LIMITED = TenantPolicy(requests_per_second=0.5, concurrency=1)
_INTERACTIVE = TenantPolicies(default=TenantPolicy(priority="interactive"))


class Variant(msgspec.Struct, frozen=True):
    name: str
    floods: bool
    policies: TenantPolicies


VARIANTS = (
    Variant("alone", False, TenantPolicies()),
    Variant("limited", True, TenantPolicies(tenants={FLOOD: _LIMITED})),
    Variant(
        "limited batch",
        True,
        msgspec.structs.replace(_INTERACTIVE, tenants={FLOOD: msgspec.structs.replace(_LIMITED, priority="batch")}),
    ),
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
    """`p90_ratios`: TTFT P90 of a variant to that without the flood."""

    runs: list[FloodRun]
    p90_ratios: dict[str, float]


def traffic_of(variant: Variant) -> list[Traffic]:
    return [*_WELL, _FLOOD] if variant.floods else _WELL


def run_of(variant: Variant, samples: Sequence[Sample]) -> FloodRun:
    well = [sample for sample in samples if sample.tenant != FLOOD]
    flood = [sample for sample in samples if sample.tenant == FLOOD]
    waits = [sample.ttft for sample in well if sample.ttft is not None]
    return FloodRun(
        variant=variant.name,
        requests=len(well),
        refused=sum(sample.status != 200 for sample in well),
        ttft_p50=quantile(waits, 0.5),
        ttft_p90=quantile(waits, 0.9),
        flood_sent=len(flood),
        flood_served=sum(sample.status == 200 for sample in flood),
    )


def round_of(runs: list[FloodRun]) -> FloodRound:
    alone = runs[0].ttft_p90
    ratios = {r.variant: round(r.ttft_p90 / alone, 3) for r in runs[1:] if alone and r.ttft_p90}
    return FloodRound(runs=runs, p90_ratios=ratios)
