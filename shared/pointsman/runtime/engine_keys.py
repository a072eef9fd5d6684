"""Which API key an engine asks for. In: the setting, `[INSTANCE=]KEY,...`. Keys stand in no error and no log line."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import click
from typing_extensions import override

from pointsman.runtime.settings import setting

ANY = ""
_SEPARATOR = re.compile(r"[,\s]+")
_KEY = re.compile(r"(?P<instance>[a-z0-9*-]{1,63})=(?P<own>(?!=*$)[!-~]+)|(?P<key>[!-<>-~]+=*)")
"""A key of any instance has `=` at its end alone, as base64 has."""


class EngineKeys:
    def __init__(self, text: str) -> None:
        """Raises ValueError."""
        self._keys: dict[str, str] = {}
        for number, part in enumerate(filter(None, _SEPARATOR.split(text)), 1):
            match = _KEY.fullmatch(part)
            if match is None:
                raise ValueError(f"number {number} is not [INSTANCE=]KEY, such as engine-1=KEY or gpu-*=KEY")
            instance = match["instance"] or ANY
            if instance in self._keys:
                raise ValueError(f"number {number} is another key for {instance or 'any instance'}")
            self._keys[instance] = match["own"] or match["key"]

    def of(self, instance: str) -> str:
        """Of its name, else of the first pattern that matches it, else of any; empty: none."""
        key = self._keys.get(instance)
        if key is None:
            patterns = (key for pattern, key in self._keys.items() if "*" in pattern and fnmatchcase(instance, pattern))
            key = next(patterns, self._keys.get(ANY, ""))
        return key


class EngineKeysType(click.ParamType[str]):
    name = "[instance=]key"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            EngineKeys(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@dataclass(frozen=True, kw_only=True)
class EngineKeySettings:
    """Of processes that ask engines."""

    engine_api_key: str = setting(
        "",
        "Key that the engines ask for (their --api-key), or [INSTANCE=]KEY,... with * in INSTANCE for engines whose keys differ.",
        secret=True,
        form=EngineKeysType(),
    )

    @property
    def engine_keys(self) -> EngineKeys:
        return EngineKeys(self.engine_api_key)
