"""The network between the hosts, as a process of its own: takes IP packets from the hosts' TUN devices, and delays, loses
or cuts them. In: a line of JSON per change (`LinkConditions`) on standard input. Out: a line of JSON (`Counts`) for each.

A kernel's `tc netem` would do the same; the kernels of small virtual machines lack it. TCP runs in the hosts' kernels,
so that a lost packet is really repeated, with the kernel's timeouts."""

import os
import random
import select
import sys
import time
from collections import deque

import msgspec

from pointsman.primitives import WallSeconds

PACKET_BYTES_MAX = 65_536
BURST = 64
IPV4 = 4
WAITING_MAX = 20_000
"""Packets on the way; more are lost, as by a full queue."""


class LinkConditions(msgspec.Struct, frozen=True, kw_only=True):
    """`delay`: of each packet, one way. `loss`: share of packets. `cut`: last bytes of the addresses that reach nobody."""

    delay: WallSeconds = WallSeconds(0.0)
    loss: float = 0.0
    cut: tuple[int, ...] = ()


class Counts(msgspec.Struct, kw_only=True):
    """Since the start. `lost`: by chance; `cut`: from or to a host that is cut off; `overflowed`: beyond WAITING_MAX."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    cut: int = 0
    overflowed: int = 0


class Switch:
    """`links`: descriptor of a TUN device by the last byte of its host's address."""

    def __init__(self, links: dict[int, int], *, seed: int) -> None:
        self._links = links
        self._chance = random.Random(seed)
        self._on_the_way: deque[tuple[float, int, bytes]] = deque()
        self.conditions = LinkConditions()
        self.counts = Counts()

    def receive(self, packet: bytes, now: float) -> None:
        if packet[0] >> 4 != IPV4:
            return
        source, target = packet[15], packet[19]
        link = self._links.get(target)
        if link is None:
            return
        self.counts.packets += 1
        self.counts.bytes += len(packet)
        if source in self.conditions.cut or target in self.conditions.cut:
            self.counts.cut += 1
        elif self._chance.random() < self.conditions.loss:
            self.counts.lost += 1
        elif len(self._on_the_way) >= WAITING_MAX:
            self.counts.overflowed += 1
        else:
            self._on_the_way.append((now + float(self.conditions.delay), link, packet))

    def deliver(self, now: float) -> float:
        """Sends what is due. Returns the seconds until the next packet is, -1 if there is none."""
        while self._on_the_way:
            due, link, packet = self._on_the_way[0]
            if due > now:
                return due - now
            self._on_the_way.popleft()
            try:
                os.write(link, packet)
            except OSError:  # the device is down or its queue is full
                self.counts.overflowed += 1
        return -1.0


def run(links: dict[int, int], *, seed: int) -> None:
    """Until standard input ends."""
    switch = Switch(links, seed=seed)
    devices = select.epoll()
    devices.register(sys.stdin.fileno(), select.EPOLLIN)
    for descriptor in links.values():
        os.set_blocking(descriptor, False)
        devices.register(descriptor, select.EPOLLIN)
    wait = -1.0
    while True:
        for descriptor, _ in devices.poll(wait):
            if descriptor == sys.stdin.fileno():
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                switch.conditions = msgspec.json.decode(line, type=LinkConditions)
                sys.stdout.buffer.write(msgspec.json.encode(switch.counts) + b"\n")
                sys.stdout.buffer.flush()
            else:
                _drain(switch, descriptor)
        wait = switch.deliver(time.monotonic())


def _drain(switch: Switch, descriptor: int) -> None:
    for _ in range(BURST):
        try:
            packet = os.read(descriptor, PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        switch.receive(packet, time.monotonic())


if __name__ == "__main__":
    seed, *links = sys.argv[1:]
    run(
        {int(address): int(descriptor) for address, _, descriptor in (link.partition("=") for link in links)},
        seed=int(seed),
    )
