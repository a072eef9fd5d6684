"""Hosts as network namespaces. Each has the loopback, and a TUN device to the switch. Needs root and /dev/net/tun."""

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

from pointsman_lab.hosts.switch import Counts, LinkConditions

NETWORK = "10.77.0"
NAMESPACES = Path("/run/netns")
DEVICE = Path("/dev/net/tun")
MTU = 1500
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class NoNamespacesError(click.ClickException):
    """This machine or user cannot make hosts."""


@dataclass(frozen=True, slots=True)
class Host:
    """`number`: last byte of its address."""

    name: str
    number: int
    namespace: str

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs this one on the host, in the same process."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(slots=True)
class Hosts:
    """`conditions` is that of the network; see `LinkConditions`."""

    hosts: tuple[Host, ...]
    switch: "subprocess.Popen[bytes]"
    conditions: LinkConditions = field(default_factory=LinkConditions)

    def named(self, name: str) -> Host:
        (found,) = [host for host in self.hosts if host.name == name]
        return found

    def change(self, conditions: LinkConditions) -> Counts:
        """Returns what the network has carried so far. Blocks for a moment."""
        self.conditions = conditions
        assert self.switch.stdin is not None, "it was started with pipes"
        assert self.switch.stdout is not None, "likewise"
        self.switch.stdin.write(msgspec.json.encode(conditions) + b"\n")
        self.switch.stdin.flush()
        return msgspec.json.decode(self.switch.stdout.readline(), type=Counts)

    def cut(self, host: Host) -> None:
        self.change(msgspec.structs.replace(self.conditions, cut=(*self.conditions.cut, host.number)))

    def heal(self, host: Host) -> None:
        left = tuple(number for number in self.conditions.cut if number != host.number)
        self.change(msgspec.structs.replace(self.conditions, cut=left))


@contextmanager
def made_hosts(names: Sequence[str], *, seed: int) -> Iterator[Hosts]:
    """Namespaces and the switch between them, removed afterwards. Raises NoNamespacesError."""
    if os.geteuid() != 0 or not DEVICE.exists():
        raise NoNamespacesError(f"hosts are network namespaces: this needs root and {DEVICE}")
    hosts = tuple(Host(name, 10 + number, f"pm{os.getpid()}-{name}") for number, name in enumerate(names, 1))
    _remove_abandoned()
    with ExitStack() as stack:
        devices = [stack.enter_context(_namespace(host)) for host in hosts]
        switch = _switch(hosts, devices, seed)
        stack.callback(_end, switch)
        yield Hosts(hosts, switch)


def enter(host: Host) -> None:
    """Moves this thread, and those that it starts, to the host. Raises OSError."""
    with (NAMESPACES / host.namespace).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")


def _remove_abandoned() -> None:
    """Namespaces of runs that were killed."""
    for namespace in NAMESPACES.glob("pm*-*"):
        owner = namespace.name[2:].partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _ip("netns", "delete", namespace.name)


@contextmanager
def _namespace(host: Host) -> Iterator[int]:
    """The descriptor of the host's TUN device."""
    _ip("netns", "add", host.namespace)
    try:
        device = f"pm{os.getpid() % 100_000}-{host.number}"
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", device, "netns", host.namespace)
            inside = ("-n", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", device, "mtu", str(MTU), "up")
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", device)
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        _ip("netns", "delete", host.namespace)


def _switch(hosts: Sequence[Host], devices: Sequence[int], seed: int) -> "subprocess.Popen[bytes]":
    links = [f"{host.number}={descriptor}" for host, descriptor in zip(hosts, devices, strict=True)]
    return subprocess.Popen(
        [sys.executable, "-m", "pointsman_lab.hosts.switch", str(seed), *links],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=devices,
        process_group=0,
    )


def _end(switch: "subprocess.Popen[bytes]") -> None:
    assert switch.stdin is not None, "it was started with pipes"
    switch.stdin.close()
    switch.wait()


def _ip(*arguments: str) -> None:
    """Raises NoNamespacesError."""
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespacesError("there is no ip here; install it (Debian: apt-get install iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error
