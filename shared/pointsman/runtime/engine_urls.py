"""Which URLs an engine may have. An instance joins with a URL that its worker says; requests with their prompts and the
engines' key go there. The leader removes an instance at another URL, and an ingress opens none."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import click
from typing_extensions import override

from pointsman.adapters.tcp_ports import is_loopback
from pointsman.runtime.settings import setting

REMEMBERED_MAX = 10_000
_PORTS = {"http": "80", "https": "443"}
_PATH = r"(?P<path>(?:/[A-Za-z0-9._~-]+)*)/?"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{{1,5}}))?{_PATH}", re.IGNORECASE
)
_PATTERN = re.compile(
    rf"(?P<scheme>https?)://(?P<host>[a-z0-9_.*-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{{1,5}}|\*))?{_PATH}", re.IGNORECASE
)
_INSTANCE = re.compile(r"[a-z0-9*-]{1,63}")


@dataclass(frozen=True, slots=True)
class _Place:
    scheme: str
    host: str
    port: str
    path: str


@dataclass(frozen=True)
class EngineUrlPattern:
    """`instance`: empty for any. A `*` in a host stands for part of one label, alone for any host."""

    text: str
    instance: str
    place: _Place

    @classmethod
    def parse(cls, text: str) -> "EngineUrlPattern":
        """Raises ValueError."""
        instance, equals, url = text.partition("=")
        if not equals:
            instance, url = "", text
        match = _PATTERN.fullmatch(url)
        if match is None or (equals and not _INSTANCE.fullmatch(instance)):
            raise ValueError(
                f"'{text}' is not [INSTANCE=]URL, such as http://10.0.0.*:8000 or engine-1=http://gpu-1:8000"
            )
        return cls(text, instance, _place(match))

    def names(self, instance: str) -> bool:
        return bool(self.instance) and fnmatchcase(instance, self.instance)

    def covers(self, place: _Place) -> bool:
        own = self.place
        same = (own.scheme, own.path) == (place.scheme, place.path)
        return same and own.port in ("*", place.port) and self._host.fullmatch(place.host) is not None

    @cached_property
    def _host(self) -> re.Pattern[str]:
        host = self.place.host
        label = ".*" if host == "*" else "[a-z0-9_-]*"
        return re.compile(label.join(map(re.escape, host.split("*"))))


class EngineUrls:
    def __init__(self, patterns: Sequence[EngineUrlPattern] = ()) -> None:
        """None: the loopback, any port."""
        self._patterns = tuple(patterns)
        self._known: dict[tuple[str, str], bool] = {}

    @classmethod
    def of(cls, texts: Sequence[str]) -> "EngineUrls":
        """Raises ValueError."""
        return cls([EngineUrlPattern.parse(text) for text in texts])

    def cover(self, instance: str, url: str) -> bool:
        """A pattern that names the instance excludes those that name none."""
        known = self._known.get((instance, url))
        if known is None:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            known = self._known[instance, url] = self._cover(instance, url)
        return known

    def _cover(self, instance: str, url: str) -> bool:
        match = _URL.fullmatch(url)
        if match is None:
            return False
        place = _place(match)
        if not self._patterns:
            return is_loopback(place.host.strip("[]"))
        named = [pattern for pattern in self._patterns if pattern.names(instance)]
        return any(pattern.covers(place) for pattern in named or self._patterns if named or not pattern.instance)

    def refusal(self, instance: str, url: str) -> str:
        """The reason in the log, with what to do, for one that is not covered."""
        shown = url[:200]
        if any(pattern.names(instance) for pattern in self._patterns):
            return (
                f"its URL {shown} is not the one that --engine-urls has for it: an address of an earlier run, or a "
                "stranger's. It serves once it joins with its own; change --engine-urls if this is it"
            )
        return f"its URL {shown} is not allowed: start scheduler and ingress with --engine-urls {instance}={shown} if it is yours"


class EngineUrlType(click.ParamType[str]):
    name = "[instance=]url"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return EngineUrlPattern.parse(str(value)).text
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, kw_only=True)
class EngineUrlSettings:
    """Of services that send requests to engines or decide who is one."""

    engine_urls: tuple[str, ...] = setting(
        (),
        "URL that engines may have, as [INSTANCE=]URL with * in host and port; the same for schedulers and ingresses. May be "
        "given several times. Default: any port of this host's loopback.",
        form=EngineUrlType(),
    )


def _place(match: re.Match[str]) -> _Place:
    scheme = match["scheme"].lower()
    return _Place(scheme, match["host"].lower(), (match["port"] or _PORTS[scheme]).lstrip("0") or "0", match["path"])
