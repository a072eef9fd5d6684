"""The priority class of a request: that of its tenant's policy, or a lower one that the client asks for by the header
`x-pointsman-priority`, llm-d's objective of that name, or the body's `service_tier`."""

from typing import Any, get_args

from pointsman.contracts.tenants import Priority
from pointsman_ingress.http.errors import bad_request
from pointsman_ingress.http.request_headers import Headers, header_text

HEADER = b"x-pointsman-priority"
LLM_D_HEADER = b"x-llm-d-inference-objective"  # names an object of the operator's; others than the classes are ignored

_CLASSES: dict[str, Priority] = {name: name for name in get_args(Priority)}
_RANKS = {name: rank for rank, name in enumerate(_CLASSES)}
_TIERS: dict[str, Priority] = {
    "flex": "batch",
    "default": "standard",
    "standard_only": "standard",
    "priority": "interactive",
    "fast": "interactive",
}


def priority_of(headers: Headers, service_tier: Any, highest: Priority) -> Priority:
    """Raises ApiError for a header without a class. Unknown tiers are left to the engine."""
    wanted = _wanted(headers, service_tier)
    return highest if wanted is None or _RANKS[wanted] > _RANKS[highest] else wanted


def _wanted(headers: Headers, service_tier: Any) -> Priority | None:
    if HEADER in headers:
        wanted = _CLASSES.get(header_text(headers, HEADER).lower())
        if wanted is None:
            msg = f"The header {HEADER.decode()} must be one of {', '.join(_CLASSES)}."
            raise bad_request(msg, param=HEADER.decode())
        return wanted
    if LLM_D_HEADER in headers and (objective := _CLASSES.get(header_text(headers, LLM_D_HEADER).lower())):
        return objective
    return _TIERS.get(service_tier) if isinstance(service_tier, str) else None
