"""Modules of ours that are imported or started by name: they exist, and the layers of import-linter hold for them too."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
ROOTS = tuple(LINTER["root_packages"])
LAYERED = [contract for contract in LINTER["contracts"] if contract["type"] == "layers"]
NAME = re.compile(rf"(?:{'|'.join(ROOTS)})(?:\.[a-z_][a-z_0-9]*)+\.?(?::[A-Za-z_]+)?|(?:{'|'.join(ROOTS)})")
NO_MODULES = {"pointsman.pool", "pointsman.instance", "pointsman.part", "pointsman.toml"}
"""Labels of containers, and a file."""
ENGINE_ONLY = "pointsman_vllm"
"""Runs where nothing else of ours is installed, so a command line for an engine may name it."""


def names_in(source: str) -> Iterator[str]:
    """Dotted names of our modules that are whole string literals, and packages of ours behind `-m`."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for word in [node.value, *re.findall(r"-m (\S+)", node.value)]:
                if NAME.fullmatch(word) and word not in NO_MODULES and ("." in word or word != node.value):
                    yield word.partition(":")[0].removesuffix(".")


def module_of(path: Path) -> str:
    """Dotted name of one of our files."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    start = next(i for i, part in enumerate(parts) if part in ROOTS and (i + 1 == len(parts) or parts[i + 1] != "src"))
    return ".".join(part for part in parts[start:] if part != "__init__")


def exists(name: str) -> bool:
    """Whether a module has this name, or an attribute of a module."""
    try:
        if importlib.util.find_spec(name):
            return True
    except ModuleNotFoundError:
        return False
    parent, _, attribute = name.rpartition(".")
    found = importlib.util.find_spec(parent)
    return bool(found and found.origin and re.search(rf"\b{attribute}\b", Path(found.origin).read_text()))


def allowed(importer: str, imported: str) -> bool:
    """Whether the layers in pyproject.toml let this module name that one."""
    if ENGINE_ONLY in (importer.partition(".")[0], imported.partition(".")[0]):
        return not importer.startswith("pointsman.")
    return all(
        _goes_down(contract["layers"], _below(container, importer), _below(container, imported))
        for contract in LAYERED
        for container in contract.get("containers", [""])
    )


def _below(container: str, module: str) -> str:
    """The part of the container (or the root package) that a module belongs to; empty if it is elsewhere."""
    prefix = f"{container}." if container else ""
    return module[len(prefix) :].partition(".")[0] if module.startswith(prefix) else ""


def _goes_down(layers: Sequence[str], importer: str, imported: str) -> bool:
    """Whether one layer is above the other. Packages of one layer may not name each other."""
    floors = {
        re.sub(r"[()]", "", package): n for n, layer in enumerate(layers) for package in re.split(r" [|:] ", layer)
    }
    if importer == imported or not {importer, imported} <= floors.keys():
        return True
    return floors[importer] < floors[imported]


SOURCES = sorted(p for p in [*ROOT.glob("shared/**/*.py"), *ROOT.glob("services/**/*.py")] if ".venv" not in p.parts)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Who names which module. Not worked out while tests are collected, which each process of a run does."""
    return [(module_of(path), name) for path in SOURCES for name in sorted(set(names_in(path.read_text())))]


def test_each_module_named_in_a_string_exists_and_lies_below(found: list[tuple[str, str]]) -> None:
    assert [pair for pair in found if not exists(pair[1])] == []
    assert [pair for pair in found if not allowed(*pair)] == []


def test_the_tables_of_commands_are_among_them(found: list[tuple[str, str]]) -> None:
    assert ("pointsman_cli.main", "pointsman_cli.up.command") in found
    assert ("pointsman_scheduler.checkpointer", "pointsman_scheduler.checkpointer") in found


@pytest.mark.parametrize("path", ["Makefile", "docker-compose.yml", "deploy/Dockerfile", "pyproject.toml"])
def test_entry_points_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    named = re.findall(r"-m (pointsman[\w.]+)", text) + re.findall(r'"(pointsman[\w.]+):\w+"', text)

    assert [name for name in named if not exists(name)] == []


@pytest.mark.parametrize(
    ("source", "importer"),
    [
        ('import_module("pointsman_lab.main")', "pointsman_cli.main"),
        ('[sys.executable, "-m", "pointsman_cli.main"]', "pointsman.runtime.processes"),
        ('name = "pointsman_worker.main:main"', "pointsman_ingress.main"),
        ('name = "python -m pointsman_scheduler"', "pointsman_ingress.main"),
        ('name = "pointsman.runtime.settings"', "pointsman.adapters.clocks"),
        ('name = "pointsman.state"', "pointsman.contracts.codec"),
    ],
)
def test_a_name_that_breaks_the_layers_is_found(source: str, importer: str) -> None:
    (imported,) = names_in(source)

    assert not allowed(importer, imported)


def test_a_name_of_no_module_is_found() -> None:
    assert not exists("pointsman.no_such_module")
    assert not exists("pointsman.state.state.no_such_name")
