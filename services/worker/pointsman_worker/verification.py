"""Tracks unverified blocks, of which removals may have been missed, and the order of giving them up."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from pointsman.adapters.kv_events.events import EngineHash
from pointsman.primitives import Seconds
from pointsman_worker.engine_blocks import UNVERIFIED_COPIES, VERIFIED, Block

GIVEN_UP_BLOCKS_MAX = 65_536  # a store that builds on one restores it


class Verification:
    """`unverifiable`: removals may be lost unnoticed, so blocks need repeated confirmation."""

    def __init__(self, nodes: Mapping[EngineHash, Block]) -> None:
        self._nodes = nodes
        self.unverifiable = False
        self.given_up: OrderedDict[EngineHash, Block] = OrderedDict()
        self._expiring: deque[tuple[Seconds, deque[Block]]] = deque()  # by time; stale entries are skipped
        self._oldest: list[tuple[Seconds, Block]] = []  # by confirmation, oldest last

    @property
    def complete(self) -> bool:
        unverified = any(
            n.copies == UNVERIFIED_COPIES or (n.copies and n.unverified != VERIFIED) for n in self._nodes.values()
        )
        return not (self.given_up or self.unverifiable or unverified)

    def set_unverifiable(self, now: Seconds, *, on: bool) -> None:
        """Off: removals are visible again, and none was lost."""
        if on == self.unverifiable:
            return
        self.unverifiable = on
        if on:
            self.mark_all(now)
            return
        for node in self._nodes.values():
            if node.copies != UNVERIFIED_COPIES:
                node.unverified = VERIFIED

    def mark_counts_unverified(self, now: Seconds = 0.0) -> None:
        for node in self._nodes.values():
            if node.copies:
                node.copies = UNVERIFIED_COPIES
        self.mark_all(now)

    def mark_all(self, now: Seconds) -> None:
        marked = [node for node in self._nodes.values() if node.copies and node.unverified == VERIFIED]
        for node in marked:
            node.unverified = now
        if marked:
            self._expiring.append((now, deque(marked)))

    def confirm(self, blocks: list[Block], now: Seconds) -> None:
        if self.unverifiable:
            self._expiring.append((now, deque(blocks)))

    def expired(self, until: Seconds) -> Iterator[Block]:
        """Each once, also if the rest is asked for later."""
        while self._expiring and self._expiring[0][0] <= until:
            since, nodes = self._expiring[0]
            while nodes:
                node = nodes.popleft()
                if node.copies and node.unverified == since:
                    yield node
            self._expiring.popleft()

    def longest_unconfirmed(self) -> Block:
        """Among equals the end of a prompt first."""
        while True:
            while self._oldest:
                confirmed, node = self._oldest.pop()
                if node.copies and node.confirmed == confirmed:
                    return node
            held = [node for node in self._nodes.values() if node.copies]
            held.sort(key=lambda node: node.confirmed, reverse=True)
            self._oldest = [(node.confirmed, node) for node in held]

    def give_up(self, block: Block) -> Block | None:
        """Returns the block evicted by the bound, if any."""
        self.given_up[block.engine_hash] = block
        return self.given_up.popitem(last=False)[1] if len(self.given_up) > GIVEN_UP_BLOCKS_MAX else None

    def clear(self) -> None:
        self._expiring.clear()
        self._oldest.clear()
        self.given_up.clear()
