"""Plants small defects, one at a time, and reports whether unit tests or torture find each. A mutant is one changed
expression or dropped statement of a file in MUTATED, loaded in a forked process; the source tree is not written. A
surviving mutant lacks a test, or makes no difference."""

import ast
import importlib
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Literal

import click
from typing_extensions import override

CPU_SECONDS_MAX = 150
WALL_SECONDS_MAX = 1500
"""Of a mutant that waits for something. On a busy machine the tests alone take longer than CPU_SECONDS_MAX."""

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
"""Imported before the fork; none imports our modules."""

TESTS = {
    "shared/pointsman/state": ("state", "policies"),
    "shared/pointsman/policies": ("policies", "state"),
    "services/worker/pointsman_worker": ("worker",),
}

MUTATED = ("policies/dispatch", "state/", "pointsman_worker/translator")
UNMUTATED = ("trackers/", "__init__", "dead_letters", "outages")

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

OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}

Fate = Literal["killed by tests", "killed by torture", "took too long", "survived"]


@dataclass(frozen=True, slots=True)
class Mutant:
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
    tree = ast.parse(source)
    statement, change = next(site for at, site in enumerate(_sites(tree)) if at == number)
    before = ast.unparse(statement)
    line = getattr(change.node, "lineno", statement.lineno)
    change.make()
    ast.fix_missing_locations(tree)
    after = ast.unparse(statement) if not change.dropped else "(dropped)"
    return Mutant(file, line, change.what, before.split("\n")[0], after.split("\n")[0], ast.unparse(tree))


class _Change:
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
        case ast.IfExp():
            yield _Change("swap the branches", node, "test", ast.UnaryOp(op=ast.Not(), operand=deepcopy(node.test)))
        case ast.Constant(value=bool() as value):
            yield _Change(f"{value} to {not value}", node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield _Change(f"{value} to {value + 1}", node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in OPPOSITES:
            yield _Change(f"{name} to {OPPOSITES[name]}", function, "id", OPPOSITES[name])
        case _:
            pass


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Planted(MetaPathFinder, Loader):
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


def sources(root: Path) -> dict[str, str]:
    files = (file for package in TESTS for file in sorted((root / package).rglob("*.py")))
    return {str(file.relative_to(root)): file.read_text() for file in files}


def module_name(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "shared" else parts[2:])


def judge(mutant: Mutant, root: Path, seeds: Sequence[int], *, with_tests: bool = True) -> Outcome:
    """Runs its tests and seeds in a child process, up to the first failure."""
    folders = (
        next(folders for package, folders in TESTS.items() if mutant.file.startswith(package)) if with_tests else ()
    )
    started = time.monotonic()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _run_child(mutant, root, seeds, folders, send)
    os.close(send)
    fate, by = _answer(receive, child)
    os.waitpid(child, 0)
    seconds = round(time.monotonic() - started, 1)
    return Outcome(mutant.file, mutant.line, mutant.what, mutant.before, mutant.after, fate, by, seconds)


def _answer(receive: int, child: int) -> tuple[Fate, str]:
    before = signal.signal(signal.SIGALRM, lambda _signal, _frame: os.killpg(child, signal.SIGKILL))
    signal.alarm(WALL_SECONDS_MAX)
    try:
        with os.fdopen(receive, "rb") as pipe:
            answer = pipe.read().decode()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if not answer:
        return "took too long", f"{CPU_SECONDS_MAX} s of CPU, {WALL_SECONDS_MAX} s in all, or its process died"
    fate, _, by = answer.partition("\n")
    return fate, by  # type: ignore[return-value]  # what _run_child wrote


def _run_child(mutant: Mutant, root: Path, seeds: Sequence[int], folders: Sequence[str], send: int) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    try:
        fate, by = _found(mutant, root, seeds, folders)
    except BaseException as error:  # noqa: BLE001 - a module that cannot be imported any more is found
        fate, by = "killed by tests", f"raises {error!r}"[:200]
    os.write(send, f"{fate}\n{by}".encode())
    os._exit(0)


def _found(mutant: Mutant, root: Path, seeds: Sequence[int], folders: Sequence[str]) -> tuple[Fate, str]:
    sys.meta_path.insert(0, _Planted(module_name(mutant.file), root / mutant.file, mutant.source))
    pytest = importlib.import_module("pytest")
    options = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-seed=1", "--assert=plain"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}"]
    first = _FirstFailure()
    tests = [str(root / "tests/unit" / folder) for folder in folders]
    if tests and pytest.main([*options, *tests], plugins=[first]) != 0:
        return "killed by tests", first.name
    run = importlib.import_module("pointsman_lab.torture.run")
    for seed in seeds:
        problems = run.run_seed(seed).problems
        if problems:
            return "killed by torture", f"seed {seed}: {problems[0]}"[:200]
    return "survived", ""


class _FirstFailure:
    name = "collection"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.name == "collection":
            self.name = report.nodeid


def sampled(root: Path, count: int, seed: int, only: str) -> list[Mutant]:
    texts = {
        file: text
        for file, text in sources(root).items()
        if only in file and any(part in file for part in MUTATED) and not any(part in file for part in UNMUTATED)
    }
    every = [(file, number) for file, text in texts.items() for number, _ in enumerate(_sites(ast.parse(text)))]
    chosen = Random(f"mutants {seed}").sample(every, min(count, len(every)))
    click.echo(f"{len(chosen)} of {len(every)} mutants")
    return [mutant_of(file, texts[file], number) for file, number in chosen]
