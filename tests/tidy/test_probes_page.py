"""docs/operations.md has every part that `/readyz` may name, and says where it is missing and where degraded."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [
    *sorted((ROOT / "services").glob("*/pointsman_*")),
    *(ROOT / f"shared/{n}" for n in ("pointsman", "pointsman_cli")),
]
TELLING = {"missing": {"missing"}, "degraded": {"degraded"}, "lacks": {"missing", "degraded"}}
"""Names of functions that tell of a part, and the columns that they need. `_lacks` is a `lacks`."""
PASSED_ON = {"part", "self._named(part)"}
"""Where the part is that of a caller."""
OF_A_CALLER = "self._part"
"""`part=` of a Recovery."""
OF_A_SOURCE = "source.name"
"""A form of `--discover`."""
OF_ENGINE = " of INSTANCE"
ONE_MEANING = {"fold", "leadership"}
"""Parts that several modules tell of: `fold` in processes of their own, `leadership` in a leader's life one after another."""


@dataclass(frozen=True)
class Told:
    part: str
    column: str
    where: str


@cache
def told() -> list[Told]:
    return [found for folder in FOLDERS for file in sorted(folder.rglob("*.py")) for found in told_in(file)]


def told_in(file: Path) -> Iterator[Told]:
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name == "Recovery":
            parts = [
                part for keyword in call.keywords if keyword.arg == "part" for part in parts_of(file, keyword.value)
            ]
            columns = {"missing"}
        elif name.removeprefix("_") in TELLING and len(call.args) == 2:
            parts, columns = parts_of(file, call.args[0]), TELLING[name.removeprefix("_")]
        else:
            continue
        yield from (
            Told(part, column, f"{file.relative_to(ROOT)}:{call.lineno}")
            for part in parts
            for column in sorted(columns)
        )


def parts_of(file: Path, named: ast.expr) -> list[str]:
    """Fails for an expression that this test does not know."""
    text = ast.unparse(named)
    if isinstance(named, ast.Constant):
        return [str(named.value)]
    if text in PASSED_ON or text == OF_A_CALLER:
        return []
    if text == OF_A_SOURCE:
        return [f"{scheme}:..." for scheme in source_schemes()]
    assert isinstance(named, ast.Name), f"{file}: what part is {text}?"
    return [getattr(import_module(module_of(file)), named.id)]


def source_schemes() -> list[str]:
    tree = ast.parse((ROOT / "shared/pointsman/adapters/discovery/sources.py").read_text())
    return [
        str(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant)
    ]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1 if parts[0] == "shared" else 2 :])


def rows() -> dict[str, dict[str, str]]:
    """By part, the columns of its row. What is missing to one engine of several only degrades the worker (`OF_ENGINE`)."""
    page = (ROOT / "docs/operations.md").read_text()
    section = page.partition("\n## Probes\n")[2].partition("\n## ")[0]
    found: dict[str, dict[str, str]] = {}
    for line in section.partition("| part |")[2].splitlines():
        if line.startswith("| `"):
            names, missing, degraded, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                missing_in = degraded if name.endswith(OF_ENGINE) else missing
                found[name.removesuffix(OF_ENGINE)] = {
                    "missing": missing_in,
                    "degraded": degraded,
                    "meaning": meaning,
                }
    return found


def test_the_table_has_the_parts_of_the_code_and_no_others() -> None:
    assert set(rows()) == {one.part for one in told()}


def test_a_part_is_told_of_in_one_module() -> None:
    """Where two do, one that is well again hides what the other lacks."""
    modules: dict[str, set[str]] = defaultdict(set)
    for one in told():
        modules[one.part].add(one.where.partition(":")[0])

    assert {part for part, found in modules.items() if len(found) > 1} == ONE_MEANING


def test_each_row_says_where_its_part_is_missing_and_where_degraded() -> None:
    table = rows()

    assert [one for one in told() if not table[one.part][one.column]] == []
    assert [part for part, row in table.items() if not row["meaning"]] == []
