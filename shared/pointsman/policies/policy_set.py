"""Builds policies by name and settings, from a command line or from a recorded event (`recorded_policy_set`, the
inverse of `PolicySet.settings`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import msgspec

from pointsman.contracts.decisions import Settings
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION, AdmissionPolicy
from pointsman.policies.decode_placement import DEFAULT_DECODE_PLACEMENT, DecodePlacement
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES, OrderingPolicy
from pointsman.policies.outliers import DEFAULT_OUTLIER_DETECTION, NO_OUTLIER_DETECTION, OutlierDetection
from pointsman.policies.policy import Policy
from pointsman.policies.queue_limits import HOLD_MAX, PENDING_MAX, PREFILL_WINDOW_TOKENS, RUNNING_MAX
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES, RebalancingPolicy
from pointsman.policies.retired import present_or_retired
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES, RoutingPolicy
from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES, ScalingPolicy
from pointsman.policies.setting_text import PREFIXES
from pointsman.primitives import EngineSeconds, Tokens
from pointsman.state.trackers.base import Tracker

P = TypeVar(
    "P",
    RoutingPolicy,
    AdmissionPolicy,
    OrderingPolicy,
    RebalancingPolicy,
    ScalingPolicy,
    DecodePlacement,
    OutlierDetection,
)

ADMISSION_PREFIX, ORDERING_PREFIX = PREFIXES["admission"], PREFIXES["order"]
DECODE_PREFIX, OUTLIER_PREFIX = PREFIXES["pair"], PREFIXES["outlier"]


class UnknownPolicyError(ValueError):
    """Unknown policy or setting; the message lists the valid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    routing: RoutingPolicy
    admission: AdmissionPolicy
    ordering: OrderingPolicy
    prefill_window_tokens: Tokens = PREFILL_WINDOW_TOKENS
    """Uncached prompt tokens inside an engine before their first token; a single request may exceed it."""
    running_max: int = RUNNING_MAX
    pending_max: int = PENDING_MAX
    hold_seconds: EngineSeconds = 0.0
    """Engine seconds that arrivals wait while no ready instance can serve them; 0: rejected at once."""
    hold_max: int = HOLD_MAX
    decode_placement: DecodePlacement = DEFAULT_DECODE_PLACEMENT
    rebind: bool = False
    copies: bool = False
    """Hot prefixes are copied to further instances (`prefix_copies`)."""
    outliers: OutlierDetection = DEFAULT_OUTLIER_DETECTION

    def trackers(self) -> tuple[Tracker, ...]:
        return (*self.routing.trackers(), *self.admission.trackers(), *self.ordering.trackers())

    @property
    def settings(self) -> Settings:
        """Recorded in LeaderElected: with the routing name, enough to recompute a term."""
        outliers = _prefixed(OUTLIER_PREFIX, self.outliers.settings)
        return {**self.placement_settings, **(outliers if self.outliers != NO_OUTLIER_DETECTION else {})}

    @property
    def placement_settings(self) -> Settings:
        """Recorded in each placement and rejection."""
        return {
            **self.routing.settings,
            **_prefixed(ADMISSION_PREFIX, self.admission.settings),
            **_prefixed(ORDERING_PREFIX, self.ordering.settings),
            **_prefixed(DECODE_PREFIX, self.decode_placement.settings),
            "admission": self.admission.name,
            "ordering": self.ordering.name,
            "prefill_window_tokens": self.prefill_window_tokens,
            "running_max": self.running_max,
            "pending_max": self.pending_max,
            **({"hold_seconds": self.hold_seconds, "hold_max": self.hold_max} if self.hold_seconds else {}),
            **({"rebind": True} if self.rebind else {}),
            **({"copies": True} if self.copies else {}),
        }


DISPATCH_SETTINGS = frozenset(field.name for field in fields(PolicySet) if isinstance(field.default, int | float))
"""Recorded beside those of policies."""


def policy_set(
    *,
    routing: str = DEFAULT_ROUTING,
    admission: str = DEFAULT_ADMISSION,
    ordering: str = DEFAULT_ORDERING,
    settings: Settings | None = None,
    prefill_window_tokens: Tokens = PREFILL_WINDOW_TOKENS,
    running_max: int = RUNNING_MAX,
    pending_max: int = PENDING_MAX,
    hold_seconds: EngineSeconds = 0.0,
    hold_max: int = HOLD_MAX,
    rebind: bool = False,
    copies: bool = False,
    recorded: bool = False,
) -> PolicySet:
    """`settings`: of the routing policy; those of others have a prefix (`setting_text`). `recorded`: they may be of a retired
    version. Raises UnknownPolicyError."""
    parts: dict[str, Settings] = {prefix: {} for prefix in PREFIXES.values()}
    for name, value in (settings or {}).items():
        prefix = max((prefix for prefix in parts if name.startswith(prefix)), key=len)
        parts[prefix][name.removeprefix(prefix)] = value
    return PolicySet(
        routing=_made("routing policy", routing, ROUTING_POLICIES, parts[""], recorded=recorded),
        admission=_made("admission policy", admission, ADMISSION_POLICIES, parts[ADMISSION_PREFIX], recorded=recorded),
        ordering=_made("ordering policy", ordering, ORDERING_POLICIES, parts[ORDERING_PREFIX], recorded=recorded),
        prefill_window_tokens=prefill_window_tokens,
        running_max=running_max,
        pending_max=pending_max,
        hold_seconds=hold_seconds,
        hold_max=hold_max,
        decode_placement=_made("decode placement", "pair", {"pair": DecodePlacement}, parts[DECODE_PREFIX]),
        rebind=rebind,
        copies=copies,
        outliers=_made("outlier detection", "outlier", {"outlier": OutlierDetection}, parts[OUTLIER_PREFIX]),
    )


def rebalancing_policy(name: str = DEFAULT_REBALANCING, settings: Settings | None = None) -> RebalancingPolicy:
    """Raises UnknownPolicyError."""
    return _made("rebalancing policy", name, REBALANCING_POLICIES, settings or {})


def scaling_policy(name: str = DEFAULT_SCALING, settings: Settings | None = None) -> ScalingPolicy:
    """Raises UnknownPolicyError."""
    return _made("scaling policy", name, SCALING_POLICIES, settings or {})


def recorded_policy_set(routing: str, settings: Settings) -> PolicySet:
    """`settings`: as `PolicySet.settings` wrote them. Raises UnknownPolicyError."""
    rest = explicit(routing, settings)
    if not any(name.startswith(OUTLIER_PREFIX) for name in rest):  # its leader ejected no instance
        rest |= _prefixed(OUTLIER_PREFIX, NO_OUTLIER_DETECTION.settings)
    try:
        return policy_set(
            routing=routing,
            admission=str(rest.pop("admission")),
            ordering=str(rest.pop("ordering")),
            prefill_window_tokens=int(rest.pop("prefill_window_tokens")),
            running_max=int(rest.pop("running_max")),
            pending_max=int(rest.pop("pending_max")),
            hold_seconds=float(rest.pop("hold_seconds", 0.0)),
            hold_max=int(rest.pop("hold_max", HOLD_MAX)),
            rebind=bool(rest.pop("rebind", False)),
            copies=bool(rest.pop("copies", False)),
            settings=rest,
            recorded=True,
        )
    except KeyError as error:
        raise UnknownPolicyError(f"the settings of {routing or 'no policy'} lack {error}") from error


def explicit(routing: str, settings: Settings) -> Settings:
    """Recorded settings, with what a record says by lacking them."""
    named: dict[str, type[Policy] | None] = {
        "": ROUTING_POLICIES.get(routing),
        ADMISSION_PREFIX: ADMISSION_POLICIES.get(str(settings.get("admission"))),
        ORDERING_PREFIX: ORDERING_POLICIES.get(str(settings.get("ordering"))),
    }
    said: Settings = {}
    for prefix, present in named.items():
        if present is not None:
            own = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
            said |= _prefixed(prefix, present_or_retired(present, own).absent)
    return said | settings


def _prefixed(prefix: str, settings: Settings) -> Settings:
    return {prefix + name: value for name, value in settings.items()}


def _made(kind: str, name: str, known: Mapping[str, type[P]], settings: Settings, *, recorded: bool = False) -> P:
    _require(kind, name, known)
    policy = known[name]
    if recorded and issubclass(policy, Policy):
        policy = present_or_retired(policy, settings)
    for setting in settings:
        _require(f"setting of {name}", setting, [field.name for field in fields(policy)])
    try:
        return msgspec.convert(settings, policy, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise UnknownPolicyError(f"{name}: {error}") from error


def _require(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UnknownPolicyError(f"there is no {kind} {name}; there are: {names}")
