"""The KV cache of one engine, block by block, as in vLLM. A full block gets a hash, chained over all tokens before it,
and is *cached*: requests share it, and it stays after its last holder until evicted. Requests release tail first, so
the cache stays closed under prefixes. Hashes are the engine's own, never Pointsman's keys. Unlike vLLM, a second copy
of a block is dropped as soon as it is full, so a hash is stored once."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from typing_extensions import override

from pointsman.contracts.cache import Tier
from pointsman.primitives import Tokens, little_endian
from pointsman.simulation.eviction_rlt import RandomisedLeafToken

BlockHash = int

HASH_BYTES = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """LoRA adapter and tenant salt: equal tokens with different identities have different hashes."""

    lora: str = ""
    cache_salt: str = ""

    def extra_keys(self, *, first_block: bool) -> tuple[str, ...] | None:
        """Hashed with a block's tokens; the salt only in the first block."""
        keys = (*((self.lora,) if self.lora else ()), *((self.cache_salt,) if first_block and self.cache_salt else ()))
        return keys or None


ANYONE = PromptIdentity()


@dataclass(frozen=True, slots=True)
class RunCached:
    """Consecutive blocks of one prefix. `parent`: None at the start of a prompt. `tokens`: empty if unknown."""

    parent: BlockHash | None
    hashes: Sequence[BlockHash]
    tokens: Sequence[int]
    identity: PromptIdentity
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """In the order of eviction."""

    hashes: Sequence[BlockHash]
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Of all tiers."""


CacheChange = RunCached | BlocksEvicted | CacheReset


class BlockHasher:
    def __init__(self, *, block_tokens: Tokens, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        self._root = blake2b(f"engine-{seed}".encode(), digest_size=HASH_BYTES).digest()

    def extend(self, parent: BlockHash | None, tokens: "array[int]", identity: PromptIdentity) -> list[BlockHash]:
        """Hashes of the whole blocks in `tokens` (unsigned 32-bit)."""
        data = little_endian(tokens.typecode, tokens)
        width = self.block_tokens * tokens.itemsize
        previous = self._root if parent is None else parent.to_bytes(HASH_BYTES, "little")
        hashes = []
        for start in range(0, len(data) - width + 1, width):
            extra = identity.extra_keys(first_block=parent is None and start == 0)
            suffix = repr(extra).encode() if extra else b""
            block = previous + data[start : start + width] + suffix
            previous = blake2b(block, digest_size=HASH_BYTES).digest()
            hashes.append(int.from_bytes(previous, "little"))
        return hashes


TokenSource = Callable[[int, int], Sequence[int]]
"""Generated tokens from `start` to `stop`, counted from the first."""


class BlockChain(Protocol):
    hashes: list[BlockHash]
    identity: PromptIdentity

    def extend_to(self, blocks: int) -> None: ...

    def tokens(self, first: int, last: int) -> Sequence[int]:
        """Of blocks `first` to `last` (exclusive); empty if unknown."""
        ...


class TokenChain(BlockChain):
    def __init__(self, prompt: Sequence[int], *, generated: TokenSource, hasher: BlockHasher, identity: PromptIdentity):
        try:
            self._tokens = array("I", prompt)
        except (OverflowError, TypeError) as error:
            raise ValueError("token ids must be integers from 0 to 4294967295") from error
        self._prompt_length = len(prompt)
        self._generated = generated
        self._hasher = hasher
        self.identity = identity
        self.hashes = hasher.extend(None, self._tokens, identity)

    @override
    def extend_to(self, blocks: int) -> None:
        if blocks <= len(self.hashes):
            return
        width = self._hasher.block_tokens
        known = len(self._tokens)
        if blocks * width > known:
            missing = self._generated(known - self._prompt_length, blocks * width - self._prompt_length)
            self._tokens.extend(missing)
        parent = self.hashes[-1] if self.hashes else None
        fresh = self._tokens[len(self.hashes) * width : blocks * width]
        self.hashes += self._hasher.extend(parent, fresh, self.identity)

    @override
    def tokens(self, first: int, last: int) -> Sequence[int]:
        width = self._hasher.block_tokens
        return self._tokens[first * width : last * width].tolist()


class OpaqueChain(BlockChain):
    def __init__(self, hashes: Sequence[BlockHash], *, unique: int) -> None:
        self.hashes = list(hashes)
        self.identity = ANYONE
        self._unique = unique

    @override
    def extend_to(self, blocks: int) -> None:
        while len(self.hashes) < blocks:
            previous = self.hashes[-1] if self.hashes else 0
            self.hashes.append(_scrambled(previous ^ _scrambled(self._unique)))

    @override
    def tokens(self, first: int, last: int) -> Sequence[int]:
        return ()


class EvictionOrder(Protocol):
    def grow(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None: ...

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """The last holder released these blocks, tail first."""
        ...

    def discard(self, block: BlockHash) -> None: ...

    def take(self, count: int) -> list[BlockHash]: ...

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class LeastRecentlyUsed(EvictionOrder):
    def __init__(self) -> None:
        self._queue: OrderedDict[BlockHash, None] = OrderedDict()

    @override
    def grow(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None: ...

    @override
    def add(self, hashes: Iterable[BlockHash]) -> None:
        self._queue.update(dict.fromkeys(hashes))

    @override
    def discard(self, block: BlockHash) -> None:
        del self._queue[block]

    @override
    def take(self, count: int) -> list[BlockHash]:
        popped = self._queue.popitem
        return [popped(last=False)[0] for _ in range(count)]

    @override
    def clear(self) -> None:
        self._queue.clear()

    @override
    def __len__(self) -> int:
        return len(self._queue)


EVICTION_ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "rlt": RandomisedLeafToken[BlockHash],
}


class BlockCache:
    """A fixed number of blocks: *private* (of one request, not full), cached, or empty."""

    def __init__(self, *, blocks_max: int, order: EvictionOrder | None = None) -> None:
        self.blocks_max = blocks_max
        self._holders: dict[BlockHash, int] = {}
        self._unheld: EvictionOrder = LeastRecentlyUsed() if order is None else order
        self._private = 0
        self._changes: list[CacheChange] = []

    @property
    def blocks_free(self) -> int:
        return self.blocks_max - self._private - len(self._holders) + len(self._unheld)

    @property
    def blocks_held(self) -> int:
        return self.blocks_max - self.blocks_free

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def cached(self) -> set[BlockHash]:
        return set(self._holders)

    def hit(self, hashes: Sequence[BlockHash], *, blocks_max: int) -> int:
        holders = self._holders
        count = 0
        for block in islice(hashes, blocks_max):
            if block not in holders:
                break
            count += 1
        return count

    def free_beside(self, hashes: Iterable[BlockHash]) -> int:
        """`blocks_free` after `hold(hashes)`, all of which are cached."""
        holders = self._holders
        return self.blocks_free - sum(1 for block in hashes if not holders[block])

    def hold(self, hashes: Iterable[BlockHash]) -> None:
        holders = self._holders
        for block in hashes:
            if not holders[block]:
                self._unheld.discard(block)
            holders[block] += 1

    def allocate(self, count: int) -> bool:
        """Take private blocks, evicting if needed. False, without effect, if there are too few."""
        evict = count - (self.blocks_max - self._private - len(self._holders))
        if evict > len(self._unheld):
            return False
        if evict > 0:
            self._evict(evict)
        self._private += count
        return True

    def fill(self, chain: BlockChain, first: int, last: int) -> None:
        """Private blocks `first` to `last` (exclusive) of a request are full: they become cached and held. Second
        copies are dropped."""
        hashes = chain.hashes
        fresh_from = first
        for index in range(first, last):
            if hashes[index] in self._holders:
                self._announce(chain, fresh_from, index)
                self.hold((hashes[index],))
                fresh_from = index + 1
            else:
                self._holders[hashes[index]] = 1
        self._announce(chain, fresh_from, last)
        self._private -= last - first

    def release(self, hashes: Sequence[BlockHash], *, private: int) -> None:
        """`hashes`: cached blocks, first to last; `private`: number of private ones."""
        holders = self._holders
        released = []
        for block in reversed(hashes):
            left = holders[block] - 1
            holders[block] = left
            if not left:
                released.append(block)
        self._unheld.add(released)
        self._private -= private

    def reset(self) -> bool:
        """Drop everything. False, without effect, while a request holds blocks."""
        if self.blocks_held:
            return False
        self._holders.clear()
        self._unheld.clear()
        self._changes.append(CacheReset())
        return True

    def take_changes(self) -> list[CacheChange]:
        changes, self._changes = self._changes, []
        return changes

    def _evict(self, count: int) -> None:
        evicted = self._unheld.take(count)
        for block in evicted:
            del self._holders[block]
        self._changes.append(BlocksEvicted(evicted))

    def _announce(self, chain: BlockChain, first: int, last: int) -> None:
        if first == last:
            return
        parent = chain.hashes[first - 1] if first else None
        run = RunCached(parent, chain.hashes[first:last], chain.tokens(first, last), chain.identity)
        self._unheld.grow(parent, run.hashes)
        self._changes.append(run)


def _scrambled(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
