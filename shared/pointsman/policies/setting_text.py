"""Parses `KIND.NAME=VALUE` texts of command lines into settings. Values are checked by the policies."""

from collections.abc import Iterable, Mapping

from pointsman.contracts.decisions import Settings

POLICY_KINDS = ("routing", "admission", "order", "pair", "outlier", "rebalance", "scaling")
PREFIXES = {"routing": "", "admission": "admission.", "order": "order.", "pair": "pair.", "outlier": "outlier."}
"""Kinds of the scheduler, with the prefixes of their names in the log."""


class SettingTextError(ValueError):
    """A text that is not KIND.NAME=VALUE, or names an unknown kind."""


def parts_of(text: str) -> tuple[str, str, str]:
    """Returns kind, name and value. Raises SettingTextError."""
    kind, dot, rest = text.partition(".")
    name, equals, value = rest.partition("=")
    if not (kind and dot and name and equals):
        raise SettingTextError(f"'{text}' is not KIND.NAME=VALUE")
    return kind, name, value


def settings_of(texts: Iterable[str], prefixes: Mapping[str, str] = PREFIXES) -> Settings:
    """Other POLICY_KINDS belong to other services and are skipped. Raises SettingTextError."""
    found: Settings = {}
    for text in texts:
        kind, name, value = parts_of(text)
        if kind in prefixes:
            found[prefixes[kind] + name] = value
        elif kind not in POLICY_KINDS:
            kinds = ", ".join(dict.fromkeys((*prefixes, *POLICY_KINDS)))
            raise SettingTextError(f"'{text}': there is no kind {kind}; kinds are {kinds}")
    return found


def prefixes_with(routing: str, admission: str, ordering: str) -> dict[str, str]:
    """PREFIXES, and the same by policy name: `dualmap.NAME=VALUE`."""
    return PREFIXES | {routing: PREFIXES["routing"], admission: PREFIXES["admission"], ordering: PREFIXES["order"]}
