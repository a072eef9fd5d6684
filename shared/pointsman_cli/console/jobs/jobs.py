"""What takes long and is worked out beside: stories of requests, examinations of the log, what-if runs. Each is a process
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
from pointsman_cli.console.jobs.views import DoctorView, StoryView, WhatIfChange, WhatIfRun
from pointsman_cli.console.views import RunState

STORIES_MAX = 64
STORIES_WAITING_MAX = 16
STORIES_AT_ONCE = 2
SEARCHES_WAITING_MAX = 4
"""Of stories of requests that are not remembered: the whole log is searched for each, one at a time, and anybody may make
up ids."""
STORY_WALL_SECONDS = 10.0
"""A story of a request that has not ended, or that failed, is then worked out again."""
EXAMINATION_WALL_SECONDS = 600.0
"""Of a running fleet: an older examination is done again when somebody looks."""
RUNS_MAX = 20
NOT_EXAMINED = DoctorView(
    state="waiting", at=0.0, took_seconds=0.0, entries=0, first_at=0.0, last_at=0.0, verdict="", summary=[], findings=[]
)


@dataclass(slots=True)
class Told:
    state: RunState
    ended: Sequence
    at: float
    story: StoryView | None = None
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
        """`place`, `pool`, `until`: of the log, as `--from`, `--pool` and `--until`. `wall`: a monotonic clock. `environment`: settings of the
        fleet, where they cannot be found by the place."""
        self._environment = dict(environment or {})
        self._task = partial(Task, place=place, pool=pool, until=until)
        self._recorded = recorded
        self._wall = wall
        self._told: OrderedDict[str, Told] = OrderedDict()
        self._few = asyncio.Semaphore(STORIES_AT_ONCE)
        self._one = asyncio.Semaphore(1)
        self._doctor = NOT_EXAMINED
        self._examined_at = float("-inf")
        self._runs: OrderedDict[int, WhatIfRun] = OrderedDict()
        self._run_tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def story(self, request: str, *, first: Sequence, ended: Sequence) -> Told:
        known = self._told.get(request)
        if known is not None and not self._is_stale(known, ended):
            self._told.move_to_end(request)
            return known
        waiting = sum(told.state in ("waiting", "running") for told in self._told.values())
        if waiting >= (STORIES_WAITING_MAX if first else SEARCHES_WAITING_MAX):
            return Told("failed", ended, self._wall(), problem="too many requests are being looked at; try again soon")
        told = Told("waiting", ended, self._wall(), story=known.story if known else None)
        self._told[request] = told
        self._told.move_to_end(request)
        if len(self._told) > STORIES_MAX:
            self._told.popitem(last=False)
        task = self._task(kind="story", request=request, first=first, ended=ended)
        _ = self._start(self._tell(told, task))
        return told

    def _is_stale(self, told: Told, ended: Sequence) -> bool:
        if told.state in ("waiting", "running"):
            return False
        if told.ended != ended:
            return True
        due = self._wall() > told.at + STORY_WALL_SECONDS
        return due and (told.state == "failed" or not (ended or self._recorded))

    async def _tell(self, told: Told, task: Task) -> None:
        async with self._few if task.first else self._one:
            told.state = "running"
            try:
                told.story, told.problem = await work(task, StoryView, environment=self._environment), ""
                told.state = "done"
            except JobError as error:
                told.state, told.problem = "failed", str(error)
                told.absent = isinstance(error, AbsentError)
            finally:
                told.at = self._wall()

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
