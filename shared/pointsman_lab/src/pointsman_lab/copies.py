"""`pointsman-lab copies`: memory of the processes that hold a State, and how long they take to begin. For each size one
checkpoint is made; a fresh process each reads it as a scheduler does (whole), as a rebalancer or scaler does (its head), and
as a checkpointer, which writes it again. Memory is what the process has resident beyond its modules, after the start and at
its peak; seconds are of CPU. Limits: the checkpoint comes from a file, not over NATS; no traffic follows."""

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, Literal

import click
from rich.console import Console

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksStored, Run
from pointsman.contracts.fleet import InstanceJoined
from pointsman.primitives import BlockKey, Epoch, InstanceId
from pointsman.state.checkpoint import decode_head, decode_state, encode_parts
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.prefix_index import ROOT
from pointsman.state.state import PoolSettings, State
from pointsman_cli.options import CONTEXT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table

Role = Literal["whole", "head", "writer"]
ROLES: dict[Role, str] = {"whole": "scheduler", "head": "rebalancer, scaler", "writer": "checkpointer"}
SEED = 1
PROMPT_BLOCKS = 512
SHARERS = 4
"""Instances that hold a prompt."""


@click.command("copies", context_settings=CONTEXT)
@click.option("--instances", multiple=True, type=int, default=(8, 512), show_default=True)
@click.option(
    "--blocks",
    multiple=True,
    type=int,
    default=(100_000, 1_000_000, 4_000_000),
    show_default=True,
    help="Held by all instances together.",
)
@click.option("--read", type=(str, click.Path(path_type=Path)), hidden=True)
@out_option
def copies_command(
    instances: tuple[int, ...], blocks: tuple[int, ...], read: tuple[Role, Path] | None, out: Path | None
) -> None:
    """Measure memory and start of the processes that hold a State.

    \b
      pointsman-lab copies
      pointsman-lab copies --instances 64 --blocks 500000 --out copies.json
    """
    if read is not None:
        click.echo(json.dumps(_read(*read)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for count in instances:
            for held in blocks:
                head, indexes = encode_parts(_pool(count, held))
                whole, beginning = Path(directory, "whole"), Path(directory, "head")
                whole.write_bytes(head + indexes)
                beginning.write_bytes(head)
                row: dict[str, Any] = {"instances": count, "blocks": held, "bytes": len(head) + len(indexes)}
                row["head_bytes"] = len(head)
                for role in ROLES:
                    row[role] = _in_fresh_process(role, beginning if role == "head" else whole)
                rows.append(row)
                _show(row)
    if out:
        write_json(out, {"rows": rows})


def _pool(instances: int, blocks: int) -> State:
    state, chance = State(PoolSettings()), Random(SEED)
    names = [InstanceId(f"engine-{number:03}") for number in range(instances)]
    cost = PROFILES[DEFAULT_PROFILE].prefill_cost
    for name in names:
        state.apply(
            InstanceJoined(
                at=0.0, instance=name, epoch=Epoch(1), url="", model="", block_tokens=64, engine_block_tokens=16,
                kv_capacity_tokens=0, max_model_len=0, prefill=cost,
            )
        )  # fmt: skip
    sequences = dict.fromkeys(names, 0)
    for _ in range(max(1, blocks // PROMPT_BLOCKS // SHARERS)):
        keys = [BlockKey(chance.getrandbits(64) or 1) for _ in range(PROMPT_BLOCKS)]
        for name in chance.sample(names, SHARERS):
            sequences[name] += 1
            runs = [Run(pack_keys(keys), ROOT)]
            state.apply(BlocksStored(at=0.0, instance=name, epoch=Epoch(1), sequence=sequences[name], runs=runs))
    return state


def _in_fresh_process(role: Role, file: Path) -> dict[str, float]:
    command = [sys.executable, "-c", "from pointsman_lab.copies import copies_command as c; c()"]
    done = subprocess.run([*command, "--read", role, str(file)], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _read(role: Role, file: Path) -> dict[str, float]:
    gc.collect()
    before = _memory_mb("VmRSS")
    started = time.process_time()
    content = file.read_bytes()
    state = decode_head(content) if role == "head" else decode_state(content)
    begun = time.process_time()
    del content
    gc.collect()
    figures = {"start_s": begun - started, "resident_mb": _memory_mb("VmRSS") - before}
    if role == "writer":
        head, indexes = encode_parts(state)
        figures["write_s"] = time.process_time() - begun
        del head, indexes
    figures |= {"peak_mb": _memory_mb("VmHWM") - before, "modules_mb": before}
    return {name: round(value, 3) for name, value in figures.items()}


def _memory_mb(what: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{what}:")) / 1024


def _show(row: dict[str, Any]) -> None:
    title = f"{row['instances']} instances, {row['blocks']:,} blocks, {row['bytes'] / 2**20:.1f} MB, head {row['head_bytes']:,} B"
    made = table("process", ">resident MB", ">peak MB", ">start s", ">write s", title=title)
    for role, name in ROLES.items():
        found = row[role]
        written = f"{found['write_s']:.2f}" if "write_s" in found else ""
        made.add_row(name, f"{found['resident_mb']:.0f}", f"{found['peak_mb']:.0f}", f"{found['start_s']:.2f}", written)
    Console().print(made)
