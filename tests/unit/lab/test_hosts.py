"""The network between the hosts of `pointsman-lab hosts`, its faults, and what a phase of a run is said to have cost."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.contracts.decisions import LeaderElected
from pointsman.ports import LogEntry
from pointsman.primitives import Term, WallSeconds
from pointsman_lab.faults.schedule import FaultError
from pointsman_lab.hosts.faults import DEFAULT_FAULTS, host_faults
from pointsman_lab.hosts.phases import Phase, measure
from pointsman_lab.hosts.switch import WAITING_MAX, LinkConditions, Switch


def packet(source: int, target: int, version: int = 4) -> bytes:
    return bytes([version << 4, *[0] * 11, 10, 77, 0, source, 10, 77, 0, target]) + b"body"


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """A pipe in place of host 12's device: what it reads, what the switch writes to."""
    out, into = os.pipe()
    os.set_blocking(out, False)
    yield out, into
    os.close(out)
    os.close(into)


def test_a_packet_arrives_after_the_delay_and_at_its_target_alone(ends: tuple[int, int]) -> None:
    switch = Switch({12: ends[1]}, seed=1)
    switch.conditions = LinkConditions(delay=WallSeconds(0.02))
    switch.receive(packet(11, 12), now=1.0)
    switch.receive(packet(11, 13), now=1.0)
    switch.receive(packet(11, 12, version=6), now=1.0)

    assert switch.deliver(1.015) == pytest.approx(0.005)
    assert switch.deliver(1.02) == -1
    assert os.read(ends[0], 100) == packet(11, 12)
    assert switch.counts.packets == 1


def test_the_share_that_is_lost_is_the_one_asked_for_and_repeats_with_the_seed(ends: tuple[int, int]) -> None:
    lost = []
    for _ in range(2):
        switch = Switch({12: ends[1]}, seed=7)
        switch.conditions = LinkConditions(loss=0.05)
        for _ in range(10_000):
            switch.receive(packet(11, 12), now=1.0)
        lost.append(switch.counts.lost)

    assert lost[0] == lost[1]
    assert 400 < lost[0] < 600


def test_a_host_that_is_cut_off_neither_sends_nor_receives(ends: tuple[int, int]) -> None:
    switch = Switch({11: ends[1], 12: ends[1]}, seed=1)
    switch.conditions = LinkConditions(cut=(12,))
    switch.receive(packet(11, 12), now=1.0)
    switch.receive(packet(12, 11), now=1.0)

    assert switch.deliver(1.0) == -1
    assert switch.counts.cut == 2


def test_what_is_on_the_way_is_bounded(ends: tuple[int, int]) -> None:
    switch = Switch({12: ends[1]}, seed=1)
    for _ in range(WAITING_MAX + 3):
        switch.receive(packet(11, 12), now=1.0)

    assert switch.counts.overflowed == 3


def test_faults_are_named_by_what_happens_and_where() -> None:
    assert [fault.name for fault in host_faults(DEFAULT_FAULTS)] == list(DEFAULT_FAULTS)
    with pytest.raises(FaultError, match="partition:"):
        host_faults(["partition:network"])


def test_a_phase_counts_what_happened_in_it(tmp_path: Path) -> None:
    access = {"log": "access", "status": 200, "retries": 0, "stream": True, "queue_ms": 3.0, "first_byte_ms": 50.0}
    lines = [
        access | {"time": "2026-11-22T12:00:01Z"},
        access | {"time": "2026-11-22T12:00:02Z", "queue_ms": 9.0, "stream": False},
        access | {"time": "2026-11-22T12:00:11Z", "queue_ms": 7.0},
        {"event": "nats_disconnected", "level": "warning", "timestamp": "2026-11-22T12:00:03Z"},
    ]
    (tmp_path / "ingress.log").write_text("\n".join([*map(json.dumps, lines), "no JSON"]))
    begin = 1795348800.0
    elected = LeaderElected(at=begin + 4, term=Term(2), scheduler="s", as_of=0, pool={}, policy="p", settings={})
    phase = Phase(name="calm", begin=begin, end=begin + 10)

    measure([phase], [LogEntry(1, "", b"", elected)], tmp_path)

    assert (phase.requests, phase.elections, phase.disconnected) == (2, 1, 1)
    assert phase.queue_ms == (3.0, 3.0, 3.0)
