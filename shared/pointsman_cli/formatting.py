"""Number formats of tables and sentences."""


def milliseconds(value: float) -> str:
    return f"{value * 1000:.1f} ms"


def share(value: float) -> str:
    return f"{value:.1%}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)
