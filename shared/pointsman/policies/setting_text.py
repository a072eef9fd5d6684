"""Policy settings on command lines, `KIND.NAME=VALUE`: text in, values by name out. Policies check the values."""

from collections.abc import Iterable, Mapping

from pointsman.contracts.decisions import Settings

POLICY_KINDS = ("routing", "admission", "order", "pair", "outlier", "rebalance", "scaling")
PREFIXES = {"routing": "", "admission": "admission.", "order": "order.", "pair": "pair.", "outlier": "outlier."}
"""Kinds that the scheduler takes, and how the log prefixes their names."""


class SettingTextError(ValueError):
    """A text that is not KIND.NAME=VALUE, or names an unknown kind."""


def parts_of(text: str) -> tuple[str, str, str]:
    """Kind, name and value. Raises SettingTextError."""
    kind, dot, rest = text.partition(".")
    name, equals, value = rest.partition("=")
    if not (kind and dot and name and equals):
        msg = f"'{text}' is not KIND.NAME=VALUE"
        raise SettingTextError(msg)
    return kind, name, value


def settings_of(texts: Iterable[str], prefixes: Mapping[str, str] = PREFIXES) -> Settings:
    """The settings of the kinds (or policies) in `prefixes`, each name with its kind's prefix. Other POLICY_KINDS are left
    out: they are for another service. Raises SettingTextError."""
    found: Settings = {}
    for text in texts:
        kind, name, value = parts_of(text)
        if kind in prefixes:
            found[prefixes[kind] + name] = value
        elif kind not in POLICY_KINDS:
            kinds = ", ".join(dict.fromkeys((*prefixes, *POLICY_KINDS)))
            msg = f"'{text}': there is no kind {kind}; kinds are {kinds}"
            raise SettingTextError(msg)
    return found


def prefixes_with(routing: str, admission: str, ordering: str) -> dict[str, str]:
    """PREFIXES, and the same by the names of the chosen policies: `dualmap.NAME=VALUE`."""
    return PREFIXES | {routing: PREFIXES["routing"], admission: PREFIXES["admission"], ordering: PREFIXES["order"]}
