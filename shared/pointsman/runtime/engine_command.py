"""An engine's command line with placeholders, filled in for each engine.

{instance}, {index}: its name, and its number from 0. {port}: of its HTTP server. {kv_events}: the whole of `--kv-events-config`.
{kv}, {replay}: endpoints of its KV events as Unix sockets. {kv_port}, {replay_port}: the same as TCP ports. The command line is split
before it is filled in, so JSON needs no quoting. The worker connects to what the command line mentions.
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
