"""Formats and orders of tables and sentences."""

from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.primitives import EngineSeconds, Tokens


def milliseconds(value: float) -> str:
    return f"{value * 1000:.1f} ms"


def seconds(value: EngineSeconds) -> str:
    return f"{value:.3f} s" if abs(value) < 10 else f"{value:.1f} s"


def share(value: float) -> str:
    return f"{value:.1%}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def output_bound(tokens: Tokens) -> str:
    """Of `max_output_tokens`."""
    return f"up to {tokens:,}" if tokens < OUTPUT_UNBOUNDED else "any number of"


def by_name(name: str) -> tuple[int, str]:
    """Sort key: engine-2 before engine-10."""
    return len(name), name


def were(count: int) -> str:
    return "was" if count == 1 else "were"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)
