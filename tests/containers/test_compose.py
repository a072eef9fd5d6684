"""docker-compose.yml from a clean copy, as README and deploy/README.md have it."""

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.fleet import ContainerFleet, running_fleet
from tests.support.compose import ROOT

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

CHAT = {"model": "pointsman-sim", "max_tokens": 8, "messages": [{"role": "user", "content": "a long prompt " * 200}]}


@pytest.fixture(scope="module")
def fleet(copy: Path) -> Iterator[ContainerFleet]:
    with running_fleet(copy, "containers", build=True, files=("docker-compose.yml",)) as fleet:
        yield fleet


def test_the_curl_line_of_the_readme_streams(fleet: ContainerFleet) -> None:
    (line,) = re.findall(r"^curl -N .*?\}'$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    command = shlex.split(line.replace("\\\n", " ").replace("http://127.0.0.1:8080", fleet.url))

    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    events = [event.removeprefix("data: ") for event in answer.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    assert len(events) > 3
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


def test_a_repeated_prompt_is_sent_to_its_cache(fleet: ContainerFleet) -> None:
    first, second = ask(fleet.url), ask(fleet.url)

    assert first["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("fleet --from nats://nats:4222", "ready"),
        ("doctor --from nats://nats:4222", ""),
        ("explain --slowest 1 --all --from nats://nats:4222", "placed"),
        ("replay --verify --from nats://nats:4222", "different 0"),
    ],
)
def test_an_operator_looks_around_with_the_service_for_commands(
    fleet: ContainerFleet, command: str, shown: str
) -> None:
    assert shown in fleet.pointsman(*command.split())


def test_the_console_shows_the_engines(fleet: ContainerFleet) -> None:
    address = f"http://127.0.0.1:{fleet.variables['POINTSMAN_CONSOLE_PORT']}"
    with urllib.request.urlopen(f"{address}/api/fleet", timeout=10) as answer:
        shown = json.load(answer)
    with urllib.request.urlopen(address, timeout=10) as answer:
        page = answer.read().decode()

    names = {engine["instance"] for engine in shown["instances"]}
    assert len(names) == 2
    assert all(name in page for name in names)


def test_all_of_it_runs_one_image_as_a_user_without_rights(fleet: ContainerFleet) -> None:
    images = {container.image for container in fleet.containers().values() if container.state == "running"}
    users = {
        service: fleet.command("exec", "-T", service, "id", "-u").strip() for service in ("nats", "ingress", "engine")
    }

    assert len(images) == 1
    assert set(users.values()) == {"10001"}


def ask(url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
    return content
