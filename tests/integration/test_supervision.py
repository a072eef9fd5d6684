"""How a process ends: by which signal, how often it comes, and when it gives up on itself."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

KILLED_EXIT_CODE = 137
PROGRAM = """
import asyncio, time
from pointsman.runtime import supervision
from pointsman.runtime.structured_logs import configure_logging

configure_logging('error', 'text')
supervision.STOP_SECONDS_MAX = {kill}
supervision.SAME_SIGNAL_SECONDS = {same}

async def main(supervisor):
    supervisor.stop_seconds_max = {patience}
    print('ready', flush=True)
    await supervisor.until_stopped()
    print('stopping', supervisor.for_good, flush=True)
    {then}
    print('hurried', flush=True)

supervision.run(main)
"""


def program_that(then: str, *, same: float = 0, patience: float = 60, kill: float = 5) -> str:
    """`kill`: how many seconds it has to end once it hurries."""
    return PROGRAM.format(then=then, same=same, patience=patience, kill=kill)


@pytest.mark.parametrize(("first", "for_good"), [(signal.SIGTERM, "False"), (signal.SIGINT, "True")])
def test_a_second_signal_hurries_who_is_stopping_already(first: signal.Signals, for_good: str) -> None:
    with running(program_that("await supervisor.until_hurried()")) as process:
        said = [line_of(process)]
        process.send_signal(first)
        said.append(line_of(process))
        process.send_signal(signal.SIGTERM)
        said.append(line_of(process))

    assert said == ["ready", f"stopping {for_good}", "hurried"]
    assert process.returncode == 0


def test_the_same_signal_once_more_at_once_is_no_second_one() -> None:
    program = program_that("await supervisor.until_hurried()", same=60, patience=0.5, kill=0.5)
    with running(program) as process:
        said = [line_of(process)]
        process.send_signal(signal.SIGTERM)
        said.append(line_of(process))
        process.send_signal(signal.SIGTERM)
        said.append(line_of(process))

    assert said == ["ready", "stopping False", ""]
    assert process.returncode == KILLED_EXIT_CODE


@pytest.mark.parametrize("signals", [1, 2])
def test_who_does_not_end_in_the_time_it_has_is_killed(signals: int) -> None:
    patience = 0.2 if signals == 1 else 60
    with running(program_that("await asyncio.Event().wait()", patience=patience, kill=0.5)) as process:
        line_of(process)
        process.send_signal(signal.SIGTERM)
        line_of(process)
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert process.returncode == KILLED_EXIT_CODE


def test_who_hangs_while_it_stops_is_killed_likewise() -> None:
    with running(program_that("time.sleep(120)", patience=0.2)) as process:
        line_of(process)
        process.send_signal(signal.SIGTERM)
        line_of(process)

        assert process.wait(30) == KILLED_EXIT_CODE


def test_the_first_process_of_a_container_ends_likewise() -> None:
    """The kernel drops a SIGKILL that it sends itself."""
    as_first = ("unshare", "--pid", "--fork", "--kill-child")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*as_first, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no process namespaces can be made here")
    with running(program_that("await asyncio.Event().wait()", patience=0.2, kill=0.5), as_first) as process:
        line_of(process)
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        line_of(process)

        assert process.wait(10) == KILLED_EXIT_CODE


@pytest.mark.parametrize("error", ["ValueError('broken')", "asyncio.CancelledError"])
def test_a_task_that_fails_ends_the_process_without_waiting_for_anything(error: str) -> None:
    fails = f"async def fail():\n    raise {error}\n\n"
    waits = "supervisor.start(fail(), name='fails'); await supervisor.until_hurried(); await supervisor.until_stopped()"
    program = program_that("pass").replace("await supervisor.until_stopped()", waits)
    with running(program.replace("async def main", fails + "async def main")) as process:
        process.wait(30)

    assert process.returncode == 1


@pytest.mark.parametrize("waits", ["asyncio.Event().wait()", "asyncio.to_thread(time.sleep, 60)"])
def test_a_failed_task_ends_the_process_also_when_its_cleanup_never_ends(waits: str) -> None:
    """`asyncio.Runner` waits for the threads of its loop as it closes."""
    steps = f"""
    async def fail():
        raise ValueError('broken')

    supervisor.start(fail(), name='fails')
    try:
        await supervisor.until_stopped()
    finally:
        await {waits}
"""
    program = program_that("pass", kill=0.5).replace("    await supervisor.until_stopped()", steps)
    with running(program) as process:
        process.wait(30)

    assert process.returncode == KILLED_EXIT_CODE


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("await supervisor.until_stopped()", 0, ""),
        ("raise ValueError('broken')", 1, "service_failed"),
        ("raise click.ClickException('wrong settings')", 1, "Error: wrong settings"),
        ("raise click.BadParameter('no number')", 2, "no number"),
    ],
)
def test_a_thread_that_hangs_changes_nothing_about_how_a_process_ends(ends: str, code: int, said: str) -> None:
    """`asyncio.Runner` waits for it as it closes."""
    steps = f"""
    supervisor.start(asyncio.to_thread(time.sleep, 60), name='hangs')
    await asyncio.sleep(0.1)
    print('ready', flush=True)
    {ends}
"""
    program = program_that("pass", kill=20).replace("    await supervisor.until_stopped()", steps)
    with running("import click\n" + program, stderr=subprocess.PIPE) as process:
        assert [line_of(process), line_of(process)] == ["ready", "ready"]
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        errors = process.stderr.read()

    assert (process.returncode, said in errors) == (code, True), errors
    assert "shutdown_timeout" not in errors


def test_tasks_that_are_cancelled_as_the_process_stops_are_no_failures() -> None:
    waits = "supervisor.start(asyncio.Event().wait(), name='waits'); await supervisor.until_stopped()"
    program = program_that("pass").replace("await supervisor.until_stopped()", waits)
    with running(program) as process:
        line_of(process)
        process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert process.returncode == 0


HANGS = """
    def stuck():
        time.sleep(60)
    stuck()
"""
FILLS_ITS_LOG = """
import os
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b'x' * 512)
except BlockingIOError:
    os.set_blocking(2, True)
"""


@pytest.mark.parametrize("before", ["", FILLS_ITS_LOG])
def test_a_process_whose_event_loop_hangs_says_where_and_ends_also_if_nobody_reads_its_log(before: str) -> None:
    program = before + hung_after(2, program_that("pass").replace("    await supervisor.until_stopped()", HANGS))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        code = process.wait(30)
        assert process.stderr is not None
        said = process.stderr.read()

    assert code == KILLED_EXIT_CODE
    assert before or re.search(r"event_loop_hung +seconds=2.*in stuck\n.*EventLoopHungError", said, re.DOTALL)


def test_a_process_that_was_stopped_for_longer_than_that_goes_on() -> None:
    with running(hung_after(2, program_that("pass"))) as process:
        line_of(process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert process.returncode == 0


def hung_after(seconds: int, program: str) -> str:
    return program.replace("supervision.STOP", f"supervision.HUNG_SECONDS = {seconds}\nsupervision.STOP", 1)


@contextmanager
def running(
    program: str, before: Sequence[str] = (), *, stderr: int | None = None
) -> "Iterator[subprocess.Popen[str]]":
    command = [*before, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
            process.wait(30)
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
