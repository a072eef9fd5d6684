"""One service in several processes on the same ports: `--processes N`. The parent reserves the ports, forks, restarts dead
children, kills hung ones, forwards signals; without event loop and threads, so forking is safe. Children listen with
SO_REUSEPORT (docs/decisions/0038). Prometheus reads its multiprocess directory at import, so the parent executes itself
again with it."""

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
import structlog
from prometheus_client import multiprocess

from pointsman.adapters.backoff import RestartBackoff
from pointsman.adapters.child_process import die_with_parent
from pointsman.primitives import Seconds
from pointsman.runtime.bounded_metrics import Writer
from pointsman.runtime.memory import freeze_started
from pointsman.runtime.metrics_page import METRICS_DIRECTORY

log = structlog.get_logger()

HUNG_SECONDS: Seconds = 15.0
"""A child silent for this long is killed: the kernel keeps giving it connections."""
LOOK_SECONDS: Seconds = 1.0
PROCESSES_MAX = 255
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OUR_DIRECTORY = "pointsman-metrics-"

Serve = Callable[[int, list[socket.socket], Callable[[], None]], None]
"""Arguments: number from 1, sockets to listen on, heartbeat to call every second once listening."""


@dataclass(frozen=True, slots=True)
class Address:
    """`options`: those that choose it."""

    host: str
    port: int
    options: str = "--host and --port"


def share_metrics() -> None:
    """Gives the processes a directory for their metrics; executes this one again with it. To be called first."""
    if METRICS_DIRECTORY not in os.environ:
        os.environ[METRICS_DIRECTORY] = tempfile.mkdtemp(prefix=OUR_DIRECTORY)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def serve_in_processes(count: int, *, addresses: Sequence[Address], serve: Serve) -> NoReturn:
    """Run until a signal, after `share_metrics`. Raises click.ClickException if a port is taken."""
    metrics = Path(os.environ[METRICS_DIRECTORY])
    try:
        metrics.mkdir(parents=True, exist_ok=True)
        for file in metrics.glob("*.db"):
            file.unlink(missing_ok=True)
        with ExitStack() as stack:
            reserved = [stack.enter_context(_reserved(address)) for address in addresses]
            code = _Parent(count, reserved, serve).run()
    finally:
        if metrics.name.startswith(OUR_DIRECTORY):
            shutil.rmtree(metrics, ignore_errors=True)
    sys.exit(code)


class _Child:
    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.has_listened = False
        self.last_heartbeat_at: float | None = None
        self.start_at = 0.0
        self._backoff = RestartBackoff()

    def ended(self, now: float) -> Seconds:
        wait = self._backoff.wait(now)
        self.pid, self.last_heartbeat_at, self.start_at = 0, None, now + wait
        return wait


class _Parent:
    def __init__(self, count: int, reserved: Sequence[socket.socket], serve: Serve) -> None:
        self._children = [_Child(number) for number in range(1, count + 1)]
        self._reserved = reserved
        self._serve = serve
        self._stopping = False
        self._exit_code = 0
        self._heartbeats, self._heartbeat_pipe = os.pipe()
        self._signals, self._signalled = os.pipe()
        os.set_blocking(self._signalled, False)

    def run(self) -> int:
        """Returns 0, or the exit code of a child that ended before it ever listened."""
        for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        multiprocess.mark_process_dead(Writer.name)  # type: ignore[no-untyped-call]  # the parent measures nothing
        freeze_started()  # so that the children's collections do not touch, and copy, what they share
        while True:
            self._start_due()
            if self._stopping and not any(child.pid for child in self._children):
                return self._exit_code
            self._wait()
            self._kill_hung()

    def _start_due(self) -> None:
        for child in self._children:
            if not (self._stopping or child.pid) and time.monotonic() >= child.start_at:
                child.start_at = time.monotonic()
                child.pid = self._fork(child.number)

    def _wait(self) -> None:
        began = time.monotonic()
        due = [child.start_at for child in self._children if not (self._stopping or child.pid)]
        seconds = max(0.0, min([began + LOOK_SECONDS, *due]) - began)
        readable, _, _ = select.select([self._signals, self._heartbeats], [], [], seconds)
        paused_seconds = time.monotonic() - began - seconds
        for child in self._children:
            if child.last_heartbeat_at is not None:
                child.last_heartbeat_at += max(0.0, paused_seconds)  # we did not run either, so the machine stood still
        if self._heartbeats in readable:
            for number in os.read(self._heartbeats, 4096):
                child = self._children[number - 1]
                child.has_listened, child.last_heartbeat_at = True, time.monotonic()
        if self._signals in readable:
            for number in os.read(self._signals, 4096):
                if number in FORWARDED_SIGNALS:
                    self._stop(signal.Signals(number))
            self._reap()

    def _kill_hung(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.pid and child.last_heartbeat_at is not None and now - child.last_heartbeat_at > HUNG_SECONDS:
                log.error("process_unresponsive", number=child.number, pid=child.pid, seconds=HUNG_SECONDS)
                child.last_heartbeat_at = None
                os.kill(child.pid, signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        """Forward a signal; a second one ends children at once."""
        self._stopping = True
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        multiprocess.mark_process_dead(child.number)  # type: ignore[no-untyped-call]
        pid = child.pid
        wait = child.ended(time.monotonic())
        if self._stopping:
            self._exit_code = self._exit_code or abs(code)
        elif not child.has_listened:
            self._exit_code = abs(code) or 1  # its settings are wrong: it has said so
            self._stop(signal.SIGTERM)
        else:
            log.error("process_ended", number=child.number, pid=pid, exit_code=code, restart_seconds=wait)

    def _fork(self, number: int) -> int:
        hold = die_with_parent()
        everything = set(signal.valid_signals())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            log.info("process_started", number=number, pid=pid)
            return pid
        try:
            os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the parent, which hands it on
            if hold is not None:
                hold()
            signal.set_wakeup_fd(-1)
            for each in (*FORWARDED_SIGNALS, signal.SIGCHLD):
                signal.signal(each, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for unused in (self._signals, self._signalled, self._heartbeats):
                os.close(unused)
            Writer.name = str(number)
            code = self._run_child(number)
        except BaseException:  # noqa: BLE001 - nothing of the parent's may run on in a child
            sys.excepthook(*sys.exc_info())
            code = 1
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _run_child(self, number: int) -> int:
        listeners = [_bound(reserved.family, reserved.getsockname()) for reserved in self._reserved]
        try:
            self._serve(number, listeners, lambda: self._send_heartbeat(number))
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return 0

    def _send_heartbeat(self, number: int) -> None:
        os.write(self._heartbeat_pipe, bytes([number]))


def _reserved(wanted: Address) -> socket.socket:
    """Bound but never listening: it keeps the port while children restart. Raises click.ClickException if taken."""
    try:
        family, *_, address = socket.getaddrinfo(
            wanted.host or None, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        return _bound(family, address)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {wanted.host}:{wanted.port} ({error}); choose another with {wanted.options}"
        ) from error


def _bound(family: int, address: object) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(address)  # type: ignore[arg-type]  # as the system gave it
    return bound
