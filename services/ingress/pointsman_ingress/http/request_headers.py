"""Reads tenant, session and latency SLOs from request headers; values are safe to log and send back."""

from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant
from pointsman_ingress.http.errors import bad_request

NAME_LENGTH_MAX = 128
SLO_MILLISECONDS_MIN, SLO_MILLISECONDS_MAX = 0.001, 1e12
ANONYMOUS = Tenant("anonymous")

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
