"""Free ports."""

import random
import subprocess
import sys

import pytest

from pointsman.adapters.tcp_ports import HIGHEST, LOWEST, free_ports

ASKS = """
import random
from pointsman.adapters.tcp_ports import free_ports
random.randrange = lambda _: {offset}
print(*free_ports(3), flush=True)
input()
"""


def test_who_asks_while_another_has_not_used_its_ports_yet_gets_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = random.randrange(HIGHEST - LOWEST)
    monkeypatch.setattr(random, "randrange", lambda _: offset)
    command = [sys.executable, "-c", ASKS.format(offset=offset)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        meanwhile = {*free_ports(3), *free_ports(3)}
        other.kill()

    assert len(theirs) == 3
    assert len(meanwhile) == 6
    assert not theirs & meanwhile
