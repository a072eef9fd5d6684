"""What takes long and is worked out beside: timelines of requests, examinations of the log, what-if runs. Each is a process
(`running`) and a view that says how far it is; few run at a time, and few results are kept."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from pointsman.primitives import Sequence
from pointsman.runtime.containment import note_failure
from pointsman_cli.console.jobs.process import Task
from pointsman_cli.console.jobs.running import AbsentError, JobError, work
from pointsman_cli.console.jobs.views import DoctorView, TimelineView, WhatIfChange, WhatIfRun
from pointsman_cli.console.views import RunState

TIMELINES_MAX = 64
TIMELINES_WAITING_MAX = 16
TIMELINES_AT_ONCE = 2
SEARCHES_WAITING_MAX = 4
"""Of timelines of requests that are not remembered: the whole log is searched for each, one at a time, and anybody may make
up ids."""
TIMELINE_WALL_SECONDS = 10.0
"""The timeline of a request that has not ended, or that failed, is then worked out again."""
EXAMINATION_WALL_SECONDS = 600.0
"""Of a running fleet: an older examination is done again when somebody looks."""
RUNS_MAX = 20
NOT_EXAMINED = DoctorView(
    state="waiting", at=0.0, took_seconds=0.0, entries=0, first_at=0.0, last_at=0.0, verdict="", summary=[], findings=[]
)


@dataclass(slots=True)
class TimelineJob:
    state: RunState
    ended: Sequence
    at: float
    timeline: TimelineView | None = None
    problem: str = ""
    absent: bool = False
    """The log was read, and does not have the request."""


class Jobs:
    def __init__(
        self,
        place: str | None,
        pool: str | None,
        *,
        recorded: bool,
        wall: Callable[[], float],
        environment: Mapping[str, str] | None = None,
        until: str | None = None,
    ) -> None:
        """`place`, `pool`, `until`: of the log, as `--from`, `--pool` and `--until`. `wall`: a monotonic clock.
        `environment`: settings of the fleet, where they cannot be found by the place."""
        self._environment = dict(environment or {})
        self._task = partial(Task, place=place, pool=pool, until=until)
        self._recorded = recorded
        self._wall = wall
        self._timelines: OrderedDict[str, TimelineJob] = OrderedDict()
        self._few = asyncio.Semaphore(TIMELINES_AT_ONCE)
        self._one = asyncio.Semaphore(1)
        self._doctor = NOT_EXAMINED
        self._examined_at = float("-inf")
        self._runs: OrderedDict[int, WhatIfRun] = OrderedDict()
        self._run_tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def timeline(self, request: str, *, first: Sequence, ended: Sequence) -> TimelineJob:
        known = self._timelines.get(request)
        if known is not None and not self._is_stale(known, ended):
            self._timelines.move_to_end(request)
            return known
        waiting = sum(job.state in ("waiting", "running") for job in self._timelines.values())
        if waiting >= (TIMELINES_WAITING_MAX if first else SEARCHES_WAITING_MAX):
            return TimelineJob(
                "failed", ended, self._wall(), problem="too many requests are being looked at; try again soon"
            )
        job = TimelineJob("waiting", ended, self._wall(), timeline=known.timeline if known else None)
        self._timelines[request] = job
        self._timelines.move_to_end(request)
        if len(self._timelines) > TIMELINES_MAX:
            self._timelines.popitem(last=False)
        task = self._task(kind="timeline", request=request, first=first)
        _ = self._start(self._work_out(job, task))
        return job

    def _is_stale(self, job: TimelineJob, ended: Sequence) -> bool:
        if job.state in ("waiting", "running"):
            return False
        if job.ended != ended:
            return True
        due = self._wall() > job.at + TIMELINE_WALL_SECONDS
        return due and (job.state == "failed" or not (ended or self._recorded))

    async def _work_out(self, job: TimelineJob, task: Task) -> None:
        async with self._few if task.first else self._one:
            job.state = "running"
            try:
                job.timeline, job.problem = await work(task, TimelineView, environment=self._environment), ""
                job.state = "done"
            except JobError as error:
                job.state, job.problem = "failed", str(error)
                job.absent = isinstance(error, AbsentError)
            finally:
                job.at = self._wall()

    def examination(self) -> DoctorView:
        is_old = self._wall() > self._examined_at + EXAMINATION_WALL_SECONDS
        if self._doctor is NOT_EXAMINED or (is_old and not self._recorded):
            self.examine()
        return self._doctor

    def examine(self) -> None:
        if self._doctor.state != "running":
            self._examined_at = self._wall()
            self._doctor = msgspec.structs.replace(self._doctor, state="running", problem="")
            _ = self._start(self._examine(self._task(kind="examination")))

    async def _examine(self, task: Task) -> None:
        try:
            self._doctor = await work(task, DoctorView, environment=self._environment)
        except JobError as error:
            self._doctor = msgspec.structs.replace(self._doctor, state="failed", problem=str(error))

    @property
    def runs(self) -> list[WhatIfRun]:
        """Newest first."""
        return list(reversed(self._runs.values()))

    def run(self, number: int) -> WhatIfRun | None:
        return self._runs.get(number)

    @property
    def busy(self) -> bool:
        return bool(self._run_tasks)

    def start(self, change: WhatIfChange, text: str) -> int | None:
        """The number of the run; None while another runs."""
        if self.busy:
            return None
        self._numbers += 1
        number = self._numbers
        self._runs[number] = WhatIfRun(
            id=number,
            state="running",
            change=change,
            text=text,
            started_at=round(time.time(), 3),
            took_seconds=0.0,
            progress="reading the record",
        )
        if len(self._runs) > RUNS_MAX:
            self._runs.popitem(last=False)
        self._run_tasks[number] = self._start(self._simulate(number, change))
        return number

    def cancel(self, number: int) -> None:
        if (task := self._run_tasks.get(number)) is not None:
            task.cancel()

    async def _simulate(self, number: int, change: WhatIfChange) -> None:
        started, task = self._wall(), self._task(kind="what-if", change=change)

        def changed(**fields: Any) -> None:
            if number in self._runs:
                took = round(self._wall() - started, 1)
                self._runs[number] = msgspec.structs.replace(self._runs[number], took_seconds=took, **fields)

        try:
            done = await work(task, WhatIfRun, environment=self._environment, step=lambda text: changed(progress=text))
            changed(
                state="done",
                progress="",
                rows=done.rows,
                faithful=done.faithful,
                fidelity=done.fidelity,
                notes=done.notes,
                requests=done.requests,
            )
        except JobError as error:
            changed(state="failed", progress="", problem=str(error))
        except asyncio.CancelledError:
            changed(state="cancelled", progress="")
            raise
        finally:
            self._run_tasks.pop(number, None)

    async def close(self) -> None:
        """Ends all processes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, study: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(study)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            note_failure("console_job", failure) if isinstance(failure, Exception) else None
