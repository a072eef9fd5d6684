"""The engine's blocks as a forest. A pool block is a span of `m` engine blocks, and its key belongs to the span's last.
Prompts may branch inside a span."""

from array import array
from dataclasses import dataclass

import msgspec

from pointsman.adapters.kv_events.events import EngineBlockStored, EngineHash
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey, Seconds, Tokens
from pointsman_worker.block_rules import lora_of, salt_of

PROMPT_START = BlockKey(0)  # parent key of a prompt's first block
UNVERIFIED_COPIES = -1  # held, number of copies unknown
VERIFIED = -1.0  # `unverified` of a block with certain removal events


@dataclass(slots=True, eq=False)
class Block:
    """Held, or needed by a held block of its span."""

    engine_hash: EngineHash
    span_index: int  # from 0; the last completes a pool block
    key: BlockKey | None
    """In a span's last block its pool key, before that the chain's start; None: keyed by more than tokens."""
    parent_key: BlockKey  # pool key before the span
    tail: "array[int]"  # tokens of the span so far; empty for the last block
    parent: "Block | None"  # the block before it within the span
    previous: EngineHash | None
    children: "dict[Block, None] | None" = None
    """In order. A dict, because an engine can have many prompts branch within one span."""
    copies: int = 0
    counted: bool = False  # held, as are those before it in its span, as of its last `HeldKeys.recount`
    confirmed: Seconds = 0.0  # when last known to be held
    unverified: Seconds = VERIFIED  # since when its removal may have been missed


class HeldBlock(msgspec.Struct, array_like=True, frozen=True):
    """Serialized Block; neighbours by engine hash."""

    engine_hash: EngineHash
    span_index: int
    key: BlockKey | None
    parent_key: BlockKey
    tail: list[int]
    parent: EngineHash | None
    previous: EngineHash | None
    copies: int


_NO_TOKENS: "array[int]" = array("I")


class EngineBlocks:
    def __init__(self, key_chain: KeyChain, engine_block_tokens: Tokens) -> None:
        """Raises ValueError if a pool block is not a multiple of the engine's block."""
        span, rest = divmod(key_chain.block_tokens, engine_block_tokens) if engine_block_tokens > 0 else (0, 1)
        if rest or not span:
            raise ValueError(
                f"block keys stand for {key_chain.block_tokens} tokens, which is no multiple of the engine's {engine_block_tokens}"
            )
        self._chain = key_chain
        self.block_tokens = engine_block_tokens
        self.last_index = span - 1
        self.nodes: dict[EngineHash, Block] = {}

    def insert(self, event: EngineBlockStored, parent: Block | None, count: int) -> None:
        """Adds missing nodes for the first `count` blocks. Raises ValueError, without changes, for an invalid token
        id, and for a block that is known at another place of its span."""
        width, last_index = self.block_tokens, self.last_index
        if parent is None:
            start = self._chain.root(lora=lora_of(event), cache_salt=salt_of(event))
            parent_key, span_index, before = PROMPT_START, 0, None
            tokens = array("I")
        elif parent.span_index == last_index:
            assert parent.key is not None
            start = parent_key = parent.key
            span_index, before = 0, None
            tokens = array("I")
        else:
            assert parent.key is not None
            start, parent_key, span_index, before = parent.key, parent.parent_key, parent.span_index + 1, parent
            tokens = parent.tail[:]
        span_starts, previous = 0, event.parent_block_hash
        self._check_places(event.block_hashes[:count], span_index)
        try:
            tokens.extend(event.token_ids[: count * width])
        except (OverflowError, TypeError) as error:
            raise ValueError(f"impossible token ids: {error}") from error
        keys = iter(self._chain.extend(start, tokens))
        end = len(tokens) - count * width
        for engine_hash in event.block_hashes[:count]:
            end += width
            node = self.nodes.get(engine_hash)
            if span_index == last_index:
                key = next(keys)
                if node is None:
                    node = self._add(Block(engine_hash, span_index, key, parent_key, _NO_TOKENS, before, previous))
                start = parent_key = key
                span_index, before, span_starts = 0, None, end
            else:
                if node is None:
                    tail = tokens[span_starts:end]
                    node = self._add(Block(engine_hash, span_index, start, parent_key, tail, before, previous))
                span_index, before = span_index + 1, node
            previous = engine_hash

    def adopt(self, engine_hash: EngineHash, source: "EngineBlocks") -> Block | None:
        """Adds a block, and those before it in its span, as `source` knows it. None if it does not."""
        known = self.nodes.get(engine_hash)
        if known is not None:
            return known
        missing = []
        found = source.nodes.get(engine_hash)
        while found is not None and found.engine_hash not in self.nodes:
            missing.append(found)
            found = found.parent
        before = self.nodes[found.engine_hash] if found is not None else None
        if not missing or (found is not None and before is not None and before.span_index != found.span_index):
            return None
        for part in reversed(missing):
            before = self._add(
                Block(part.engine_hash, part.span_index, part.key, part.parent_key, part.tail, before, part.previous)
            )
        return before

    def add_keyless(self, engine_hash: EngineHash) -> Block:
        return self._add(Block(engine_hash, self.last_index, None, PROMPT_START, _NO_TOKENS, None, None))

    def dump(self) -> list[HeldBlock]:
        return [
            HeldBlock(
                node.engine_hash,
                node.span_index,
                node.key,
                node.parent_key,
                list(node.tail),
                node.parent.engine_hash if node.parent is not None else None,
                node.previous,
                node.copies,
            )
            for node in self.nodes.values()
        ]

    def restore(self, blocks: list[HeldBlock]) -> None:
        """Raises ValueError for inconsistent blocks."""
        for block in blocks:
            before = self.nodes.get(block.parent) if block.parent is not None else None
            misplaced = (
                not 0 <= block.span_index <= self.last_index or block.copies < 0 or block.engine_hash in self.nodes
            )
            if misplaced or (block.parent is not None and before is None):
                raise ValueError("kept blocks contradict each other")
            tail = array("I", block.tail)
            node = Block(block.engine_hash, block.span_index, block.key, block.parent_key, tail, before, block.previous)
            self._add(node).copies = block.copies

    def _check_places(self, hashes: list[EngineHash], span_index: int) -> None:
        """Else blocks of a span could form a chain without end. Raises ValueError."""
        if not self.last_index:
            return
        new: dict[EngineHash, int] = {}
        for engine_hash in hashes:
            node = self.nodes.get(engine_hash)
            known = node.span_index if node is not None else new.setdefault(engine_hash, span_index)
            if known != span_index:
                raise ValueError(f"a block that is number {known} of its span as number {span_index}")
            span_index = span_index + 1 if span_index < self.last_index else 0

    def _add(self, node: Block) -> Block:
        self.nodes[node.engine_hash] = node
        if (before := node.parent) is not None:
            if before.children is None:
                before.children = {}
            before.children[node] = None
        return node
