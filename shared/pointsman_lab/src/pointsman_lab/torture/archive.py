"""The recorder's archive as dictionaries, with injected database failures."""

import asyncio
from operator import itemgetter
from random import Random

from typing_extensions import override

from pointsman.primitives import Sequence
from pointsman_recorder.archive import Archive, Batch, Branch, Row

ANSWER_SECONDS = 0.002


class MemoryArchive(Archive):
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.failing = 0.0
        self.logs: dict[str, Row] = {}
        self.events: dict[tuple[str, Sequence], Row] = {}
        self.dead_letters: dict[tuple[str, Sequence], Row] = {}
        self.gaps: dict[tuple[str, Sequence], Row] = {}

    @override
    async def prepare(self) -> None:
        await self._transact()

    @override
    async def latest_branch(self, identity: str) -> Branch | None:
        await self._transact()
        numbers = [row["branch"] for row in self.logs.values() if row["identity"] == identity]
        if not numbers:
            return None
        branch = Branch(identity, max(numbers))
        rows = [row for table in (self.events, self.dead_letters) for row in table.values() if row["log"] == branch.log]
        if not rows:
            return branch
        last = max(rows, key=lambda row: row["sequence"])
        payload = last["payload"]
        tail = payload if isinstance(payload, bytes) else payload.encode()
        return Branch(identity, branch.number, last["sequence"], tail)

    @override
    async def newest_numbers(self) -> dict[str, int]:
        return {row["identity"]: row["branch"] for row in sorted(self.logs.values(), key=itemgetter("branch"))}

    @override
    async def store(self, batch: Batch, after: Branch | None = None) -> None:
        fails = self._chance.random() < self.failing
        if fails and self._chance.random() < 0.5:
            await self._fail()
        await asyncio.sleep(self._chance.expovariate(1 / ANSWER_SECONDS))
        assert after is None or self._has(after)
        for row in batch.logs:
            self.logs.setdefault(row["log"], row)
        for table, rows in (
            (self.events, batch.events),
            (self.dead_letters, batch.dead_letters),
            (self.gaps, batch.gaps),
        ):
            for row in rows:
                table.setdefault((row["log"], row["sequence"]), row)
        if fails:
            await self._fail()

    def _has(self, branch: Branch) -> bool:
        entry = branch.log, branch.last
        return entry in self.events or entry in self.dead_letters or (branch.log in self.logs and not branch.last)

    async def _transact(self) -> None:
        if self._chance.random() < self.failing:
            await self._fail()
        await asyncio.sleep(self._chance.expovariate(1 / ANSWER_SECONDS))

    async def _fail(self) -> None:
        await asyncio.sleep(self._chance.expovariate(1 / ANSWER_SECONDS))
        raise OSError("the database is away")
