"""What a client says in headers: who it is, which conversation this is, and by when it wants its answer.

Pure. What a client wrote is `cleaned` before it is logged or goes into a header of ours.
"""

from dataclasses import dataclass

from pointsman.primitives import Seconds, SessionId, Tenant
from pointsman_ingress.http.openai_errors import Refusal, bad_request

NAME_LENGTH_MAX = 128
OBJECTIVE_MILLISECONDS_MAX = 1e12
ANONYMOUS = Tenant("anonymous")

Headers = dict[bytes, bytes]
"""Lower-case names; of repeated headers the last counts."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Engine seconds."""

    ttft: Seconds
    tpot: Seconds


def objectives(headers: Headers, defaults: Objectives) -> Objectives:
    """The client's objectives from `x-slo-ttft-ms` and `x-slo-tpot-ms` or their aliases. Raises Refusal."""
    ttft = _milliseconds(headers, b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
    tpot = _milliseconds(headers, b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
    if ttft is None and tpot is None:
        return defaults
    return Objectives(defaults.ttft if ttft is None else ttft, defaults.tpot if tpot is None else tpot)


def tenant_of(headers: Headers, user: str) -> Tenant:
    """Who a client without an API key says it is: the header, or the body's `user` in its place."""
    name = header_text(headers, b"x-llm-d-inference-fairness-id") or cleaned(user)
    return Tenant(name) if name else ANONYMOUS


def session_of(headers: Headers, user: str) -> SessionId:
    """The conversation that the client names, or the user in its place."""
    return SessionId(header_text(headers, b"x-session-id") or cleaned(user))


def header_text(headers: Headers, name: bytes) -> str:
    """A header's value, cleaned; empty where it is missing."""
    value = headers.get(name)
    return cleaned(value.decode("latin-1")) if value else ""


def cleaned(text: str) -> str:
    """Fit to be logged and sent back: printable ASCII only, at most 128 characters."""
    if not text:
        return ""
    text = text[:NAME_LENGTH_MAX].strip()
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c.isascii() and c.isprintable())


def _milliseconds(headers: Headers, *names: bytes) -> Seconds | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            return _seconds(value, name)
    return None


def _seconds(value: bytes, name: bytes) -> Seconds:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= OBJECTIVE_MILLISECONDS_MAX:
        raise _bad_objective(name.decode())
    return milliseconds / 1000


def _bad_objective(name: str) -> Refusal:
    return bad_request(f"The header {name} must be a positive number of milliseconds.", param=name)
