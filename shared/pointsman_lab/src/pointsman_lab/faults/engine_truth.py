"""The contents of an engine's cache: its replay socket gives all KV events since its start, folded by separate code
into pool keys."""

from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey

REPLAY_TIMEOUT_MS = 5000
END_OF_REPLAY = -1


class EngineSilentError(Exception):
    pass


async def held_keys(replay_endpoint: str, chain: KeyChain) -> set[BlockKey]:
    """The keys of all blocks in the engine's cache; an engine block must be a pool block. Raises EngineSilentError."""
    held: dict[Any, BlockKey] = {}
    for event in await _events_since_start(replay_endpoint):
        if event["type"] == "BlockStored":
            _store(held, event, chain)
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                held.pop(block, None)
        else:
            held.clear()
    return set(held.values())


def replay_endpoint_of(pid: int) -> str:
    """Replay endpoint of a simulated engine, from its command line. Raises OSError when it ended."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    config = arguments[arguments.index(b"--kv-events-config") + 1]
    return str(msgspec.json.decode(config)["replay_endpoint"])


def _store(held: dict[Any, BlockKey], event: dict[str, Any], chain: KeyChain) -> None:
    parent_hash = event["parent_block_hash"]
    parent = chain.root() if parent_hash is None else held[parent_hash]
    size = event["block_size"]
    for position, block in enumerate(event["block_hashes"]):
        tokens = event["token_ids"][position * size : (position + 1) * size]
        (parent,) = chain.extend(parent, tokens)
        held[block] = parent


async def _events_since_start(endpoint: str) -> list[dict[str, Any]]:
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        events: list[dict[str, Any]] = []
        expected = 0
        while await dealer.poll(REPLAY_TIMEOUT_MS):
            *_, sequence, payload = await dealer.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == END_OF_REPLAY:
                return events
            if number != expected:
                raise EngineSilentError(
                    f"the replay buffer of {endpoint} begins at batch {number}, which is not its start"
                )
            expected += 1
            events += msgspec.msgpack.decode(payload)[1]
        raise EngineSilentError(f"no end of the replay on {endpoint} within {REPLAY_TIMEOUT_MS} ms")
    finally:
        context.destroy(linger=0)
