"""Host memory behind the device cache of one engine, as vLLM's OffloadingConnector keeps it: a copy of each whole prompt
block, made when the device fills it; least recently used ones go first. A request's hit goes on in the host where the
device's ends. Its blocks are loaded one request after another, while the engine computes others."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from pointsman.primitives import EngineSeconds
from pointsman.simulation.block_cache import BlockCache, BlockChain, BlockHash, BlocksEvicted, CacheChange, RunCached
from pointsman.simulation.decode_ticks import EngineRequest, Phase

CLOCK_ROUNDING_SECONDS: EngineSeconds = 1e-9


class HostTier:
    def __init__(self, *, blocks_max: int, block_seconds: EngineSeconds) -> None:
        """`block_seconds`: to load one block."""
        self.blocks_max = blocks_max
        self._block_seconds = block_seconds
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self._busy_until: EngineSeconds = 0.0
        self._loading: deque[tuple[EngineSeconds, EngineRequest]] = deque()
        self._changes: list[CacheChange] = []

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, chain: BlockChain, first: int, last: int) -> None:
        """Blocks `first` to `last` (exclusive); those that it has are used again."""
        blocks = self._blocks
        missing = [index for index in range(first, last) if chain.hashes[index] not in blocks]
        for index in range(first, last):
            blocks[chain.hashes[index]] = None
            blocks.move_to_end(chain.hashes[index])
        for index in missing:
            parent = chain.hashes[index - 1] if index else None
            tokens = chain.tokens(index, index + 1)
            self._changes.append(RunCached(parent, chain.hashes[index : index + 1], tokens, chain.identity, "host"))
        evicted = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.blocks_max)]
        if evicted:
            self._changes.append(BlocksEvicted(evicted, "host"))

    def hit(self, hashes: Sequence[BlockHash], first: int, last: int) -> int:
        """Blocks from `first` without a break; they count as used."""
        end = first
        while end < last and hashes[end] in self._blocks:
            self._blocks.move_to_end(hashes[end])
            end += 1
        return end - first

    def begin_load(
        self, request: EngineRequest, hit: int, blocks_max: int, cache: BlockCache, now: EngineSeconds
    ) -> bool:
        """Loads what follows the device's `hit` of a prompt with `blocks_max` blocks to be found. False, without
        effect, if there is nothing, or the device has no room for it."""
        hashes = request.chain.hashes
        more = self.hit(hashes, hit, blocks_max)
        if not more or more > cache.free_beside(hashes[:hit]):
            return False
        cache.hold(hashes[:hit])
        cache.allocate(more)
        request.phase, request.loaded = Phase.LOADING, more
        request.full, request.blocks = hit, hit + more
        self._busy_until = max(now, self._busy_until) + more * self._block_seconds
        self._loading.append((self._busy_until, request))
        return True

    def finish_loads(self, cache: BlockCache, now: EngineSeconds) -> list[EngineRequest]:
        """Requests whose blocks are on the device now, cached and not held: whoever begins them first finds them."""
        ready = []
        while self._loading and self._loading[0][0] <= now + CLOCK_ROUNDING_SECONDS:
            request = self._loading.popleft()[1]
            cache.fill(request.chain, request.full, request.blocks)
            cache.release(request.chain.hashes[: request.blocks], private=0)
            request.phase, request.full, request.blocks = Phase.WAITING, 0, 0
            ready.append(request)
        return ready

    def abort_load(self, request: EngineRequest, cache: BlockCache) -> None:
        self._loading = deque(load for load in self._loading if load[1] is not request)
        cache.release(request.chain.hashes[: request.full], private=request.blocks - request.full)

    @property
    def loaded_at(self) -> EngineSeconds | None:
        """When the next load ends."""
        return self._loading[0][0] if self._loading else None

    def clear(self) -> None:
        self._blocks.clear()
        self._changes.clear()

    def take_changes(self) -> list[CacheChange]:
        changes, self._changes = self._changes, []
        return changes
