"""An engine's command line with places that are filled in for each engine: where it listens and publishes.

| place | is |
|---|---|
| {instance}, {index} | the engine's name, and its number from 0, for instance to choose a GPU |
| {port} | of its HTTP server |
| {kv_events} | the whole of vLLM's and SGLang's `--kv-events-config`, with the next two in it |
| {kv}, {replay} | endpoints of its KV events: Unix sockets, which no other user or machine reaches |
| {kv_port}, {replay_port} | the same for engines that must be told TCP |

A command line is taken apart before it is filled in, so that JSON needs no quoting. What it mentions is where the worker
listens; what it does not mention is taken as not there.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.adapters.tcp_ports import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """What is filled in for one engine."""

    instance: str
    port: int
    kv: str
    replay: str
    kv_port: int
    replay_port: int

    def filled(self, command: Sequence[str]) -> list[str]:
        """The command line with every place filled in; other braces stay."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.kv,
            "replay_endpoint": self.replay,
        }
        values = {
            "{kv_events}": json.dumps(events),
            "{instance}": self.instance,
            "{index}": str(_number_in(self.instance) - 1),
            "{port}": str(self.port),
            "{kv}": self.kv,
            "{replay}": self.replay,
            "{kv_port}": str(self.kv_port),
            "{replay_port}": str(self.replay_port),
        }
        return [_replaced(part, values) for part in command]

    def sockets(self, command: Sequence[str]) -> tuple[str, str]:
        """Where a worker finds the events and the replay of the engine that this command starts; empty where nowhere."""
        return (
            _endpoint(command, ("{kv_events}", "{kv}"), self.kv, "{kv_port}", self.kv_port),
            _endpoint(command, ("{kv_events}", "{replay}"), self.replay, "{replay_port}", self.replay_port),
        )


def _endpoint(command: Sequence[str], places: Sequence[str], socket: str, port_place: str, port: int) -> str:
    text = " ".join(command)
    if port_place in text:
        return f"tcp://{LOOPBACK}:{port}"
    return socket if any(place in text for place in places) else ""


def _number_in(instance: str) -> int:
    """The number that an instance's name ends with; 1 where it has none."""
    found = re.search(r"\d+$", instance)
    return int(found[0]) if found else 1


def _replaced(text: str, values: dict[str, str]) -> str:
    for place, value in values.items():
        text = text.replace(place, value)
    return text
