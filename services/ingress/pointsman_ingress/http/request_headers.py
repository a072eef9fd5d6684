"""Reads tenant, session, latency SLOs and priority class from request headers; values are safe to log and send back."""

from dataclasses import dataclass
from typing import Any, get_args

from pointsman.contracts.tenants import Priority
from pointsman.primitives import EngineSeconds, SessionId, Tenant
from pointsman_ingress.http.errors import bad_request

NAME_LENGTH_MAX = 128
SLO_MILLISECONDS_MIN, SLO_MILLISECONDS_MAX = 0.001, 1e12
ANONYMOUS = Tenant("anonymous")
PRIORITY_HEADER = b"x-pointsman-priority"
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

Headers = dict[bytes, bytes]  # lower-case names; the last of duplicates counts


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Engine seconds."""

    ttft: EngineSeconds
    tpot: EngineSeconds


def slo_of(headers: Headers, defaults: LatencySlo) -> LatencySlo:
    """Reads `x-slo-ttft-ms`, `x-slo-tpot-ms` and their aliases. Raises ApiError."""
    ttft = _milliseconds(headers, b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
    tpot = _milliseconds(headers, b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
    if ttft is None and tpot is None:
        return defaults
    return LatencySlo(defaults.ttft if ttft is None else ttft, defaults.tpot if tpot is None else tpot)


def tenant_of(headers: Headers, user: str) -> Tenant:
    name = header_text(headers, b"x-llm-d-inference-fairness-id") or cleaned(user)
    return Tenant(name) if name else ANONYMOUS


def session_of(headers: Headers, user: str) -> SessionId:
    return SessionId(header_text(headers, b"x-session-id") or cleaned(user))


def priority_of(headers: Headers, service_tier: Any, highest: Priority) -> Priority:
    """That of the tenant's policy, or a lower one that the client asks for by the header `x-pointsman-priority`, llm-d's
    objective of that name, or the body's `service_tier`. Raises ApiError for a header without a class. Unknown tiers are left
    to the engine."""
    wanted = _wanted_class(headers, service_tier)
    return highest if wanted is None or _RANKS[wanted] > _RANKS[highest] else wanted


def header_text(headers: Headers, name: bytes) -> str:
    value = headers.get(name)
    return cleaned(value.decode("latin-1")) if value else ""


def cleaned(text: str) -> str:
    """Printable ASCII only, at most 128 characters."""
    if not text:
        return ""
    text = text[:NAME_LENGTH_MAX].strip()
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c.isascii() and c.isprintable())


def _milliseconds(headers: Headers, *names: bytes) -> EngineSeconds | None:
    name = next((name for name in names if name in headers), None)
    if name is None:
        return None
    try:
        milliseconds = 0.0 if b"_" in headers[name] else float(headers[name])
    except ValueError:
        milliseconds = 0.0
    if not SLO_MILLISECONDS_MIN <= milliseconds <= SLO_MILLISECONDS_MAX:
        bounds = f"from {SLO_MILLISECONDS_MIN} to {SLO_MILLISECONDS_MAX:.0f}"
        raise bad_request(f"The header {name.decode()} must be a number of milliseconds {bounds}.", param=name.decode())
    return milliseconds / 1000


def _wanted_class(headers: Headers, service_tier: Any) -> Priority | None:
    if PRIORITY_HEADER in headers:
        wanted = _CLASSES.get(header_text(headers, PRIORITY_HEADER).lower())
        if wanted is None:
            msg = f"The header {PRIORITY_HEADER.decode()} must be one of {', '.join(_CLASSES)}."
            raise bad_request(msg, param=PRIORITY_HEADER.decode())
        return wanted
    if LLM_D_HEADER in headers and (objective := _CLASSES.get(header_text(headers, LLM_D_HEADER).lower())):
        return objective
    return _TIERS.get(service_tier) if isinstance(service_tier, str) else None
