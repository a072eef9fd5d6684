"""Mutation testing: small defects are planted, one at a time, and tests and torture must find each.

    python -m pointsman_lab.torture.mutation --sample 200 --seed 1 --json mutants.json

A mutant is one changed expression or one dropped statement of a module in TARGETS. Each runs in a process of its own, forked
from one that has imported only other people's libraries, where the changed module is loaded in place of the file: first the unit
tests that belong to the module, then some seeds of torture, until one fails. Nothing is written to the source tree. Of a mutant
that survives either a test is missing, or it makes no difference (a bound of what is remembered, a text, a shortcut).
"""

import ast
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Literal

import click
from typing_extensions import override

SECONDS_MAX = 150
"""Real time that the tests and seeds of one mutant may take; who takes longer was found, too."""
TORTURE_SEEDS = (61, 27, 67, 30)
"""Which between them have every kind of entry, most of them twice. To be chosen anew when seeds shift."""
SHOWN_MAX = 110
LIBRARIES = (
    "pytest",
    "hypothesis",
    "msgspec",
    "fastapi",
    "aiohttp",
    "structlog",
    "prometheus_client",
    "rich",
    "zmq",
    "nats",
)
"""What every child needs, and has nothing of ours in it."""

STATE_TESTS = (
    "dispatch",
    "state",
    "checkpoint",
    "decided",
    "prefix_index",
    "scaling",
    "fencing",
    "rebalancing",
    "redispatch",
    "decode_placement",
)
DISPATCH_TESTS = (
    "dispatch",
    "draining",
    "fencing",
    "decode_placement",
    "rebalancing",
    "redispatch",
    "routing",
    "scaling",
    "admission",
)
POLICIES_OF_MEMORIES = ("fairness", "ordering", "routing_baselines", "admission")

SHARED = "shared/pointsman/"
TARGETS: dict[str, tuple[str, ...]] = {
    SHARED + "policies/dispatch/placement.py": DISPATCH_TESTS,
    SHARED + "policies/dispatch/granting.py": DISPATCH_TESTS,
    SHARED + "policies/dispatch/migrations.py": DISPATCH_TESTS,
    SHARED + "policies/dispatch/splitting.py": DISPATCH_TESTS,
    SHARED + "policies/dispatch/fleet_care.py": DISPATCH_TESTS,
    SHARED + "state/state.py": STATE_TESTS,
    SHARED + "state/workload.py": STATE_TESTS,
    SHARED + "state/fleet.py": STATE_TESTS,
    SHARED + "state/prefix_index.py": STATE_TESTS,
    SHARED + "state/speculation.py": STATE_TESTS,
    SHARED + "state/decided.py": STATE_TESTS,
    SHARED + "state/latency_model.py": (*STATE_TESTS, "routing"),
    SHARED + "state/hotness.py": (*STATE_TESTS, "dualmap"),
    SHARED + "state/conversations.py": (*STATE_TESTS, "routing"),
    SHARED + "state/scaling.py": STATE_TESTS,
    SHARED + "state/checkpoint.py": (*STATE_TESTS, "kept_checkpoints", "following"),
    SHARED + "state/trackers/attainment.py": POLICIES_OF_MEMORIES,
    SHARED + "state/trackers/decode_load.py": (*POLICIES_OF_MEMORIES, "decode_placement"),
    "services/worker/pointsman_worker/translator.py": ("block_translator",),
}
"""By file: its unit tests (`tests/unit/test_<name>.py`). The trackers of other policies are left out."""

SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}

Fate = Literal["killed by tests", "killed by torture", "took too long", "survived"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted defect. `before` and `after`: the statement around it."""

    file: str
    line: int
    what: str
    before: str
    after: str
    source: str


@dataclass(frozen=True, slots=True)
class Outcome:
    file: str
    line: int
    what: str
    before: str
    after: str
    fate: Fate
    by: str
    seconds: float


def mutant_of(file: str, source: str, number: int) -> Mutant:
    """The mutant of a module at the site of that number."""
    tree = ast.parse(source)
    statement, change = next(site for at, site in enumerate(_sites(tree)) if at == number)
    before = ast.unparse(statement)
    line = getattr(change.node, "lineno", statement.lineno)
    change.make()
    ast.fix_missing_locations(tree)
    after = ast.unparse(statement) if not change.dropped else "(dropped)"
    return Mutant(file, line, change.what, before.split("\n")[0], after.split("\n")[0], ast.unparse(tree))


class _Change:
    """One change of a tree, not yet made."""

    def __init__(self, what: str, node: ast.AST, name: str, value: Any, *, at: int | None = None) -> None:
        self.what = what
        self.node = node
        self._name = name
        self._value = value
        self._at = at
        self.dropped = what.startswith("drop")

    def make(self) -> None:
        if self._at is None:
            setattr(self.node, self._name, self._value)
        else:
            getattr(self.node, self._name)[self._at] = self._value


def _sites(tree: ast.Module) -> Iterator[tuple[ast.stmt, _Change]]:
    """Whatever may be changed, with the statement that it is in. Texts, types and constants that bound memory are not."""
    for holder in ast.walk(tree):
        if not isinstance(holder, ast.FunctionDef):
            continue
        for owner in ast.walk(holder):
            for name in ("body", "orelse"):
                block = getattr(owner, name, None)
                if isinstance(block, list) and (owner is holder or not isinstance(owner, ast.FunctionDef)):
                    yield from _in_block(owner, name, block)


def _in_block(owner: ast.AST, name: str, block: list[ast.stmt]) -> Iterator[tuple[ast.stmt, _Change]]:
    for at, statement in enumerate(block):
        if isinstance(statement, ast.FunctionDef | ast.Assert | ast.Raise | ast.ClassDef) or _is_text(statement):
            continue
        if isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break) or (
            isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name | ast.Tuple)
        ):
            yield statement, _Change("drop a statement", owner, name, ast.Pass(lineno=statement.lineno), at=at)
        if isinstance(statement, ast.Return) and statement.value is None:
            yield statement, _Change("drop a return", owner, name, ast.Pass(lineno=statement.lineno), at=at)
        if isinstance(statement, ast.If | ast.While):
            test = ast.UnaryOp(op=ast.Not(), operand=statement.test)
            yield statement, _Change("negate a condition", statement, "test", test)
        for node in _own(statement):
            yield from ((statement, change) for change in _of_expression(node))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without those of the statements in it, its annotations and its texts."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        yield node
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "body", "orelse", "handlers", "finalbody") and isinstance(node, ast.stmt):
                continue
            children = child if isinstance(child, list) else [child]
            waiting += [c for c in children if isinstance(c, ast.AST) and not isinstance(c, ast.JoinedStr | ast.stmt)]


def _of_expression(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=[op]):
            for other in SWAPPED.get(type(op), ()):
                yield _Change(f"{type(op).__name__} to {other.__name__}", node, "ops", [other()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op):
            for other in SWAPPED.get(type(op), ()):
                yield _Change(f"{type(op).__name__} to {other.__name__}", node, "op", other())
        case ast.IfExp(body=body, orelse=orelse):
            yield _Change("swap the branches", node, "test", ast.UnaryOp(op=ast.Not(), operand=deepcopy(node.test)))
            del body, orelse
        case ast.Constant(value=bool() as value):
            yield _Change(f"{value} to {not value}", node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield _Change(f"{value} to {value + 1}", node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in TWINS:
            yield _Change(f"{name} to {TWINS[name]}", function, "id", TWINS[name])
        case _:
            pass


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Planted(MetaPathFinder, Loader):
    """Loads one module from changed source."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module = module
        self._path = path
        self._source = source

    @override
    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    @override
    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def module_name(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "shared" else parts[2:])


def judge(mutant: Mutant, root: Path, seeds: tuple[int, ...], *, tests: tuple[str, ...] | None = None) -> Outcome:
    """Run its tests and seeds in a child, and wait for the first that fails. `tests`: others than those of TARGETS."""
    tests = TARGETS[mutant.file] if tests is None else tests
    started = time.monotonic()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _run_child(mutant, root, seeds, tests, send)
    os.close(send)
    told = _told(receive, child)
    os.close(receive)
    os.waitpid(child, 0)
    fate, by = told
    seconds = round(time.monotonic() - started, 1)
    return Outcome(mutant.file, mutant.line, mutant.what, mutant.before, mutant.after, fate, by, seconds)


def _told(receive: int, child: int) -> tuple[Fate, str]:
    def give_up(_signal: int, _frame: object) -> None:
        os.killpg(child, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS_MAX)
    try:
        with os.fdopen(os.dup(receive), "rb") as pipe:
            told = pipe.read().decode()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if not told:
        return "took too long", f"{SECONDS_MAX} s, or its process died"
    fate, _, by = told.partition("\n")
    return fate, by  # type: ignore[return-value]  # what _run_child wrote


def _run_child(mutant: Mutant, root: Path, seeds: tuple[int, ...], tests: tuple[str, ...], send: int) -> None:
    """Never returns."""
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        fate, by = _found(mutant, root, seeds, tests)
    except BaseException as error:  # noqa: BLE001 - a module that cannot be imported any more is found out
        fate, by = "killed by tests", f"raises {error!r}"[:200]
    os.write(send, f"{fate}\n{by}".encode())
    os._exit(0)


def _found(mutant: Mutant, root: Path, seeds: tuple[int, ...], tests: tuple[str, ...]) -> tuple[Fate, str]:
    sys.meta_path.insert(0, _Planted(module_name(mutant.file), root / mutant.file, mutant.source))
    pytest = importlib.import_module("pytest")
    files = [str(root / f"tests/unit/test_{name}.py") for name in tests]
    options = [
        "-x",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "--hypothesis-seed=1",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--assert=plain",
        f"--rootdir={root}",
    ]
    first = _FirstFailure()
    if files and pytest.main([*options, *files], plugins=[first]) != 0:
        return "killed by tests", first.name
    run = importlib.import_module("pointsman_lab.torture.run")
    for seed in seeds:
        problems = run.run_seed(seed).problems
        if problems:
            return "killed by torture", f"seed {seed}: {problems[0]}"[:200]
    return "survived", ""


class _FirstFailure:
    """Which test failed first. (A pytest plugin.)"""

    name = "collection"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.name == "collection":
            self.name = report.nodeid


def sampled(root: Path, count: int, seed: int, files: tuple[str, ...]) -> list[Mutant]:
    """So many of all mutants, chosen by the seed; in an order of chance, so that a run which is broken off is a sample, too."""
    sources = {file: (root / file).read_text() for file in TARGETS if not files or any(part in file for part in files)}
    everything = [
        (file, number) for file, source in sources.items() for number, _ in enumerate(_sites(ast.parse(source)))
    ]
    chosen = Random(f"mutants {seed}").sample(range(len(everything)), min(count, len(everything)))
    click.echo(f"{len(chosen)} of {len(everything)} mutants")
    return [mutant_of(file, sources[file], number) for file, number in (everything[at] for at in chosen)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sample", default=200, show_default=True, help="Mutants to run.")
@click.option("--seed", default=1, show_default=True, help="Which ones.")
@click.option("--only", multiple=True, help="Part of a file's name; may be given several times.")
@click.option("--torture/--no-torture", default=True, help="Whether seeds of torture run where the unit tests pass.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write every outcome there.")
def main(sample: int, seed: int, only: tuple[str, ...], torture: bool, json_file: Path | None) -> None:
    """Plant defects in the dispatcher, the state and the translator, and see which of them tests and torture find."""
    root = Path.cwd()
    for name in LIBRARIES:
        importlib.import_module(name)
    outcomes: list[Outcome] = []
    for mutant in sampled(root, sample, seed, only):
        outcome = judge(mutant, root, TORTURE_SEEDS if torture else ())
        outcomes.append(outcome)
        _show(outcome)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    fates = Counter(outcome.fate for outcome in outcomes)
    killed = len(outcomes) - fates["survived"]
    told = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
    click.echo(f"{killed} of {len(outcomes)} found ({killed / max(1, len(outcomes)):.0%}): {told}")


def _show(outcome: Outcome) -> None:
    click.echo(f"{outcome.fate:18} {outcome.seconds:6.1f} s  {outcome.file}:{outcome.line}  {outcome.what}")
    if outcome.fate == "survived":
        click.echo(f"    - {outcome.before[:SHOWN_MAX]}\n    + {outcome.after[:SHOWN_MAX]}")


if __name__ == "__main__":
    main()
