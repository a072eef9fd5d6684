"""The engine's blocks as a forest: takes stores with their parent, keeps nodes with their pool key. A pool block is a
span of `m` engine blocks; its key belongs to the span's last node. Inside a span prompts may branch, so each node
refers to its predecessor."""

from array import array

import msgspec

from pointsman.adapters.kv_events.events import EngineBlockStored, EngineHash
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, Seconds, Tokens
from pointsman_worker.block_rules import lora_of, salt_of

PROMPT_START = BlockKey(0)  # parent key of a prompt's first block
UNVERIFIED_COPIES = -1  # held, number of copies unknown
VERIFIED = -1.0  # `unverified` of a block with certain removal events


class Block:
    """One engine block, held or needed by a held block of its span.

    `span_index`: from 0; the last completes a pool block. `key`: pool key of a span's last block; of others the key
    that the span starts from; None: keyed by more than tokens. `parent_key`: key before the span. `tail`: the span's
    tokens so far, empty for the last. `previous`: the block before. `confirmed`: time last known to be held.
    `unverified`: time since when its removal may have been missed.
    """

    __slots__ = (
        "above", "children", "confirmed", "copies", "counted", "engine_hash", "key", "parent", "place", "prior", "tail", "unverified",
    )  # fmt: skip

    def __init__(self, engine_hash: EngineHash, place: int, key: BlockKey | None, above: BlockKey, tail: "array[int]"):
        self.engine_hash = engine_hash
        self.place = place
        self.key = key
        self.above = above
        self.tail = tail
        self.parent: Block | None = None
        self.children: list[Block] | None = None
        self.copies = 0
        self.counted = False
        self.prior: EngineHash | None = None
        self.confirmed: Seconds = 0.0
        self.unverified: Seconds = VERIFIED


class HeldBlock(msgspec.Struct, array_like=True, frozen=True):
    """Serialized Block; neighbours by engine hash."""

    engine_hash: EngineHash
    place: int
    key: BlockKey | None
    above: BlockKey
    tail: list[int]
    parent: EngineHash | None
    prior: EngineHash | None
    copies: int


_NO_TOKENS: "array[int]" = array("I")


class EngineBlocks:
    def __init__(self, key_chain: KeyChain, engine_block_tokens: Tokens) -> None:
        """Raises ValueError if a pool block is not a multiple of the engine's block."""
        span, rest = divmod(key_chain.block_tokens, engine_block_tokens) if engine_block_tokens > 0 else (0, 1)
        if rest or not span:
            msg = f"block keys stand for {key_chain.block_tokens} tokens, which is no multiple of the engine's {engine_block_tokens}"
            raise ValueError(msg)
        self._chain = key_chain
        self.block_tokens = engine_block_tokens
        self.last_place = span - 1
        self.nodes: dict[EngineHash, Block] = {}

    def insert(self, event: EngineBlockStored, parent: Block | None, count: int) -> None:
        """Adds nodes for the event's first `count` blocks. Raises ValueError, without changes, for an invalid token
        id."""
        width, last_place = self.block_tokens, self.last_place
        if parent is None:
            start = self._chain.root(lora=lora_of(event), cache_salt=salt_of(event))
            above, place, before = PROMPT_START, 0, None
            tokens = array("I")
        elif parent.place == last_place:
            assert parent.key is not None
            start = above = parent.key
            place, before = 0, None
            tokens = array("I")
        else:
            assert parent.key is not None
            start, above, place, before = parent.key, parent.above, parent.place + 1, parent
            tokens = parent.tail[:]
        span_starts, prior = 0, event.parent_block_hash
        try:
            tokens.extend(event.token_ids[: count * width])
        except (OverflowError, TypeError) as error:
            raise ValueError(str(error)) from error
        keys = iter(self._chain.extend(start, tokens))
        end = len(tokens) - count * width
        for engine_hash in event.block_hashes[:count]:
            end += width
            node = self.nodes.get(engine_hash)
            if place == last_place:
                key = next(keys)
                if node is None:
                    node = self._add(engine_hash, place, key, above, _NO_TOKENS, before, prior)
                start = above = key
                place, before, span_starts = 0, None, end
            else:
                if node is None:
                    node = self._add(engine_hash, place, start, above, tokens[span_starts:end], before, prior)
                place, before = place + 1, node
            prior = engine_hash

    def add_keyless(self, engine_hash: EngineHash) -> Block:
        return self._add(engine_hash, self.last_place, None, PROMPT_START, _NO_TOKENS, None, None)

    def dump(self) -> list[HeldBlock]:
        return [
            HeldBlock(
                node.engine_hash,
                node.place,
                node.key,
                node.above,
                list(node.tail),
                node.parent.engine_hash if node.parent is not None else None,
                node.prior,
                node.copies,
            )
            for node in self.nodes.values()
        ]

    def restore(self, blocks: list[HeldBlock]) -> None:
        """Raises ValueError for inconsistent blocks."""
        for block in blocks:
            before = self.nodes.get(block.parent) if block.parent is not None else None
            misplaced = not 0 <= block.place <= self.last_place or block.copies < 0 or block.engine_hash in self.nodes
            if misplaced or (block.parent is not None and before is None):
                msg = "kept blocks contradict each other"
                raise ValueError(msg)
            tail = array("I", block.tail)
            node = self._add(block.engine_hash, block.place, block.key, block.above, tail, before, block.prior)
            node.copies = block.copies

    def _add(
        self,
        engine_hash: EngineHash,
        place: int,
        key: BlockKey | None,
        above: BlockKey,
        tail: "array[int]",
        before: Block | None,
        prior: EngineHash | None,
    ) -> Block:
        node = self.nodes[engine_hash] = Block(engine_hash, place, key, above, tail)
        node.prior = prior
        if before is not None:
            node.parent = before
            if before.children is None:
                before.children = []
            before.children.append(node)
        return node
