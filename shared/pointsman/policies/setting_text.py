"""Policy settings as people write them: `KIND.NAME=VALUE`. Comes in as text, goes out by name; values are checked by the policy."""

from collections.abc import Collection, Iterable

from pointsman.contracts.decisions import Settings

POLICY_KINDS = ("routing", "admission", "order", "pair", "outlier", "rebalance", "scaling")


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


def settings_of(texts: Iterable[str], own: str, *others: str, kinds: Collection[str] = POLICY_KINDS) -> Settings:
    """The settings of kind `own` by name, those of `others` by KIND.NAME (as the log writes them); further `kinds` are
    left out, they are for another service. Raises SettingTextError."""
    found: Settings = {}
    for text in texts:
        kind, name, value = parts_of(text)
        if kind not in kinds:
            msg = f"'{text}': there is no kind {kind}; kinds are {', '.join(kinds)}"
            raise SettingTextError(msg)
        if kind == own:
            found[name] = value
        elif kind in others:
            found[f"{kind}.{name}"] = value
    return found
