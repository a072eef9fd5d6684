"""Reads a recorded log to its end: an exported bundle, an archive, or what `--from` takes else. A thread reads batches; the
event loop folds them, so that nothing else touches the State."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from typing_extensions import override

from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman.simulation.replay.folding import copy_state
from pointsman.state.state import State
from pointsman_cli.console.log.source import LogSource
from pointsman_cli.console.views import Health
from pointsman_cli.history.entries import History, HistoryError
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import Moment

PART = "record"
BATCH_ENTRIES = 200


class RecordedLog(LogSource):
    def __init__(
        self,
        history: History,
        *,
        board: HealthBoard,
        until: Moment,
    ) -> None:
        """`until`: read no further."""
        super().__init__(pool=PoolName(history.header.pool), board=board)
        self.origin = history.origin
        self._history = history
        self._moment = until
        self._health: Health = "starting"
        self._thread = ThreadPoolExecutor(1, "record")
        """Reads everything: an archive's reader belongs to one thread."""

    @property
    @override
    def health(self) -> Health:
        return self._health

    @override
    async def run(self) -> None:
        """Returns at the end of the log."""
        self.board.missing(PART, "reading the recorded log")
        self._health = "catching up"
        try:
            await self._fold()
        except HistoryError as error:
            self.notes.append(error.message)
        self.finish()
        self._health = "recorded"
        self.board.restored(PART)

    async def _fold(self) -> None:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        beginning = await in_thread(beginning_of, self._history, self._moment)
        settings = await in_thread(lambda: self._history.settings)
        if beginning.note:
            self.notes.append(beginning.note)
        self.until = self._history.header.last
        observer = self.begin(State(settings) if beginning.state is None else copy_state(beginning.state))
        entries = self._history.entries(beginning.start)
        passed = self._moment.passed()
        try:
            while batch := await in_thread(lambda: list(islice(entries, BATCH_ENTRIES))):
                for entry in batch:
                    if passed(entry):
                        return
                    self.take(observer, entry)
        finally:
            await in_thread(entries.close)
