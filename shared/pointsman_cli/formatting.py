"""How amounts are written in tables. Seconds are not here: how exact they are depends on what is measured."""


def milliseconds(value: float) -> str:
    return f"{value * 1000:.1f} ms"


def share(value: float) -> str:
    return f"{value:.1%}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"
