"""`pointsman-lab index`: speed and memory of the prefix index and of the Rust `RadixTree` of NVIDIA Dynamo. Both hold
the same blocks, and their answers are compared first. Times are of the quietest of several rounds, in turns, after a round
that does not count. They are CPU times of the process, with the tree's own thread, which on a loaded machine waits for a
core. Ours include decoding of the wire format, the tree's of its JSON."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.codec import decode_event, encode
from pointsman.contracts.fleet import InstanceJoined, PrefillCost
from pointsman.primitives import BlockKey, Epoch, InstanceId
from pointsman.state.prefix_index import ROOT, PrefixIndex
from pointsman.state.state import PoolSettings, State
from pointsman_cli.options import CONTEXT, COUNT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table

SEED = 1
PROMPT_BLOCKS = 625
EVENT_BLOCKS = 32
ROUNDS = 15
EVENTS_PER_ROUND = 400
MATCHES_PER_ROUND = 100

Chain = list[BlockKey]


@dataclass(frozen=True)
class Holdings:
    chains: list[Chain]
    held: list[list[tuple[int, int]]]


def holdings(rng: Random, *, instances: int, blocks: int, prompt_blocks: int) -> Holdings:
    chains = [[BlockKey(rng.getrandbits(64)) for _ in range(prompt_blocks)] for _ in range(instances * 5)]
    held = []
    for _ in range(instances):
        mine: list[tuple[int, int]] = []
        left = blocks
        for chain in rng.sample(range(len(chains)), len(chains)):
            depth = min(left, rng.randint(1, prompt_blocks))
            mine.append((chain, depth))
            left -= depth
            if not left:
                break
        held.append(mine)
    return Holdings(chains, held)


class PointsmanIndex:
    name = "pointsman"

    def __init__(self, instances: int) -> None:
        self.state = State(PoolSettings())
        self._sequences = [0] * instances
        for number in range(instances):
            self.state.apply(
                InstanceJoined(
                    at=0.0, instance=_instance(number), epoch=Epoch(1), url="", model="", block_tokens=16,
                    engine_block_tokens=16, kv_capacity_tokens=0, max_model_len=0,
                    prefill=PrefillCost(fixed_s=0, per_token_s=0, per_token_squared_s=0),
                )
            )  # fmt: skip

    def stored(self, number: int, parent: BlockKey, keys: Chain) -> bytes:
        run = Run(pack_keys(keys), parent)
        return encode(
            BlocksStored(at=0.0, instance=_instance(number), epoch=Epoch(1), sequence=self._next(number), runs=[run])
        )

    def removed(self, number: int, keys: Chain) -> bytes:
        return encode(
            BlocksRemoved(
                at=0.0, instance=_instance(number), epoch=Epoch(1), sequence=self._next(number), keys=pack_keys(keys)
            )
        )

    def apply(self, _number: int, payload: bytes) -> None:
        self.state.apply(decode_event(payload))

    def match(self, keys: Chain) -> dict[int, int]:
        return {int(instance): depth for instance, depth in self.state.index.hits(keys).items()}

    def time_match(self, keys: Chain) -> None:
        self.state.index.hits(keys)

    def _next(self, number: int) -> int:
        self._sequences[number] += 1
        return self._sequences[number]


class Rust:
    name = "radixtree"

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self.tree: Any = RadixTree()
        self._event = 0

    def stored(self, _number: int, parent: BlockKey, keys: Chain) -> bytes:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        return self._encode({"stored": {"parent_hash": parent or None, "blocks": blocks}})

    def removed(self, _number: int, keys: Chain) -> bytes:
        return self._encode({"removed": {"block_hashes": keys}})

    def apply(self, number: int, payload: bytes) -> None:
        self.tree.apply_event(number, payload)

    def match(self, keys: Chain) -> dict[int, int]:
        scores = self.tree.find_matches(keys).scores
        return {(worker[0] if isinstance(worker, tuple) else worker): depth for worker, depth in scores.items()}

    def time_match(self, keys: Chain) -> None:
        self.tree.find_matches(keys)

    def _encode(self, data: dict[str, object]) -> bytes:
        self._event += 1
        return json.dumps({"event_id": self._event, "data": data, "dp_rank": 0}).encode()


Side = PointsmanIndex | Rust


@click.command("index", context_settings=CONTEXT)
@click.option("--instances", type=COUNT, default=64, show_default=True, help="Instances in the index.")
@click.option("--blocks", type=COUNT, default=20_000, show_default=True, help="Blocks that each instance holds.")
@out_option
def index_command(instances: int, blocks: int, out: Path | None) -> None:
    """Time the prefix index beside Dynamo's Rust RadixTree (needs the extra: pip install 'pointsman-lab[rivals]').

    \b
      pointsman-lab index                                    64 instances that hold 20,000 blocks each
      pointsman-lab index --instances 8 --blocks 2000 --out index.json
    """
    rng = Random(SEED)
    held = holdings(rng, instances=instances, blocks=blocks, prompt_blocks=PROMPT_BLOCKS)
    sides: list[Side] = [PointsmanIndex(instances)]
    try:
        sides.append(Rust())
    except ImportError:
        click.echo("the RadixTree is not installed; timing ours alone (pip install 'pointsman-lab[rivals]')", err=True)
    for side in sides:
        for number in track(range(instances), description=f"filling {side.name}"):
            _fill(side, number, held)
    _compare_answers(sides, held)
    figures = _measure(sides, held, rng) | {
        "bytes_per_block": _bytes_per_block(held),
        "longest_pause_ms": _longest_pause(instances * blocks),
    }
    _print(figures)
    if out:
        write_json(out, figures)


def _fill(side: Side, number: int, held: Holdings) -> None:
    for chain, depth in held.held[number]:
        for start in range(0, depth, 64):
            keys = held.chains[chain][start : min(depth, start + 64)]
            parent = held.chains[chain][start - 1] if start else ROOT
            side.apply(number, side.stored(number, parent, keys))


def _compare_answers(sides: list[Side], held: Holdings) -> None:
    for chain in held.chains[:20]:
        answers = [side.match(chain) for side in sides]
        if any(answer != answers[0] for answer in answers):
            raise click.ClickException(f"the sides disagree about a prompt: {answers}")


def _measure(sides: list[Side], held: Holdings, rng: Random) -> dict[str, Any]:
    times: dict[str, dict[str, list[float]]] = {
        name: {side.name: [] for side in sides} for name in ("match_us", "apply_stored_us", "apply_removed_us")
    }
    for number in track(range(1 + ROUNDS), description="measuring"):
        prompts = rng.choices(held.chains, k=MATCHES_PER_ROUND)
        fresh = [[BlockKey(rng.getrandbits(64)) for _ in range(EVENT_BLOCKS)] for _ in range(EVENTS_PER_ROUND)]
        for side in sides:
            stored = [side.stored(0, ROOT, keys) for keys in fresh]
            removed = [side.removed(0, keys[::-1]) for keys in fresh]
            taken = {
                "match_us": _time_each(side.time_match, prompts),
                "apply_stored_us": _time_each(partial(side.apply, 0), stored),
                "apply_removed_us": _time_each(partial(side.apply, 0), removed),
            }
            for name, value in taken.items() if number else ():
                times[name][side.name].append(value)
    return {name: {side: round(min(values), 2) for side, values in by_side.items()} for name, by_side in times.items()}


def _time_each(call: Callable[[Any], None], arguments: list[Any]) -> float:
    gc.collect()
    started = time.process_time()
    for argument in arguments:
        call(argument)
    return (time.process_time() - started) / len(arguments) * 1e6


def _longest_pause(blocks: int) -> float:
    """CPU time of the slowest event, in milliseconds, while one index grows to that many blocks, each held once. The lesser
    of two growths at each event: what else the machine does seldom meets the same event twice."""
    growths = []
    for _ in range(2):
        rng, index, instance, took = Random(SEED), PrefixIndex(), _instance(0), []
        index.add(instance)
        for _ in range(blocks // EVENT_BLOCKS):
            keys = [BlockKey(rng.getrandbits(64)) for _ in range(EVENT_BLOCKS)]
            started = time.thread_time()
            index.store(instance, ROOT, keys)
            took.append(time.thread_time() - started)
        growths.append(took)
    return round(max(map(min, *growths), default=0.0) * 1e3, 2)


def _bytes_per_block(held: Holdings) -> float:
    instances = min(8, len(held.held))
    tracemalloc.start()
    index = PrefixIndex()
    for number in range(instances):
        index.add(_instance(number))
        for chain, depth in held.held[number]:
            copies = [BlockKey(int(str(key))) for key in held.chains[chain][:depth]]
            index.store(_instance(number), ROOT, copies)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(used / sum(index.blocks(_instance(number)) for number in range(instances)), 1)


def _print(figures: dict[str, Any]) -> None:
    sides = list(figures["match_us"])
    columns = [f">{side}" for side in sides] + [">ratio"] * (len(sides) > 1)
    made = table("operation", *columns, title="Prefix index, microseconds of CPU time (least of several rounds)")
    for name in ("match_us", "apply_stored_us", "apply_removed_us"):
        values = [figures[name][side] for side in sides]
        ratio = [f"{values[0] / values[1]:.2f}"] if len(values) > 1 else []
        made.add_row(name.removesuffix("_us"), *(f"{value:.2f}" for value in values), *ratio)
    console = Console()
    console.print(made)
    console.print(f"memory of ours: {figures['bytes_per_block']} bytes for each block an instance holds")
    console.print(f"longest pause of ours while growing to as many blocks: {figures['longest_pause_ms']} ms")


def _instance(number: int) -> InstanceId:
    return InstanceId(str(number))
