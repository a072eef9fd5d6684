"""Placeholders in an engine's command line. {instance}, {index}: name and number from 0. {port}: HTTP. {kv_events}: all
of `--kv-events-config`. {kv}, {replay}: KV events as Unix sockets; {kv_port}, {replay_port}: as TCP ports. Split before
filling, so JSON needs no quoting."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pointsman.adapters.tcp_ports import LOOPBACK
from pointsman.runtime.settings import ENVIRONMENT_PREFIX

PLUGIN_PREFIX = ENVIRONMENT_PREFIX + "VLLM_"
FOR_ENGINES = (PLUGIN_PREFIX, ENVIRONMENT_PREFIX + "LOG_")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    instance: str
    port: int
    kv: str
    replay: str
    kv_port: int
    replay_port: int

    def filled(self, command: Sequence[str]) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.kv,
            "replay_endpoint": self.replay,
        }
        number = re.search(r"\d+$", self.instance)
        values = {
            "{kv_events}": json.dumps(events),
            "{instance}": self.instance,
            "{index}": str(int(number[0]) - 1 if number else 0),
            "{port}": str(self.port),
            "{kv}": self.kv,
            "{replay}": self.replay,
            "{kv_port}": str(self.kv_port),
            "{replay_port}": str(self.replay_port),
        }
        return [_replaced(part, values) for part in command]

    def sockets(self, command: Sequence[str]) -> tuple[str, str]:
        """Addresses of KV events and replay as the command uses them; empty if not."""
        return (
            _endpoint(command, ("{kv_events}", "{kv}"), self.kv, "{kv_port}", self.kv_port),
            _endpoint(command, ("{kv_events}", "{replay}"), self.replay, "{replay_port}", self.replay_port),
        )


def _endpoint(command: Sequence[str], places: Sequence[str], socket: str, port_place: str, port: int) -> str:
    text = " ".join(command)
    if port_place in text:
        return f"tcp://{LOOPBACK}:{port}"
    return socket if any(place in text for place in places) else ""


def _replaced(text: str, values: dict[str, str]) -> str:
    for place, value in values.items():
        text = text.replace(place, value)
    return text


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the deployment's settings, secrets among them: an engine runs code of others."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FOR_ENGINES) or not name.startswith(ENVIRONMENT_PREFIX)
    }
