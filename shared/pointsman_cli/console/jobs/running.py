"""Processes that work out what takes long (`process`): bounded in number, time and size of the answer, ended when nobody wants
the answer any more."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from pointsman.contracts.codec import short_reason
from pointsman_cli.console.jobs.process import ABSENT_EXIT_CODE, REFUSED_EXIT_CODE, Task
from pointsman_cli.console.views import View

ANSWER_BYTES_MAX = 64 * 1024**2
JOB_WALL_SECONDS_MAX = 1800.0
TAIL_LINES = 3
STEP_CHARACTERS_MAX = 200
V = TypeVar("V", bound=View)


class JobError(Exception):
    """The message is for people."""


class AbsentError(JobError):
    """The log does not have what was asked for."""


async def work(
    task: Task, answer: type[V], *, environment: Mapping[str, str], step: Callable[[str], None] = lambda _: None
) -> V:
    """Raises JobError, AbsentError. Cancelled, it ends the process."""
    try:
        output, code, tail = await _worked(task, environment, step)
    except TimeoutError as error:
        raise JobError(f"it took longer than {JOB_WALL_SECONDS_MAX:g} s") from error
    except (OSError, ValueError) as error:  # no process could be started; a line that is too long
        raise JobError(f"its process failed: {short_reason(error)}") from error
    if code == ABSENT_EXIT_CODE and output:
        raise AbsentError(short_reason(output.decode(errors="replace")))
    if code == REFUSED_EXIT_CODE and output:
        raise JobError(short_reason(output.decode(errors="replace")))
    if code:
        raise JobError(f"its process ended with {code}: {short_reason(' '.join(tail))}")
    try:
        return msgspec.json.decode(output, type=answer)
    except msgspec.DecodeError as error:
        raise JobError(f"its answer cannot be read: {short_reason(error)}") from error


async def _worked(
    task: Task, environment: Mapping[str, str], step: Callable[[str], None]
) -> tuple[bytes, int, list[str]]:
    """Returns the output, the exit code and the last steps. Raises JobError, TimeoutError, OSError, ValueError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pointsman_cli.console.jobs.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    tail: list[str] = []
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        async with asyncio.timeout(JOB_WALL_SECONDS_MAX):
            output, _ = await asyncio.gather(_output(process), _steps(process, step, tail))
            return output, await process.wait(), tail
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())


async def _output(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    found = bytearray()
    while chunk := await process.stdout.read(64 * 1024):
        found += chunk
        if len(found) > ANSWER_BYTES_MAX:
            raise JobError(f"its answer is longer than {ANSWER_BYTES_MAX >> 20} MiB")
    return bytes(found)


async def _steps(process: asyncio.subprocess.Process, step: Callable[[str], None], tail: list[str]) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        text = line.decode(errors="replace").strip()[:STEP_CHARACTERS_MAX]
        tail.append(text)
        del tail[:-TAIL_LINES]
        step(text)
