"""What a stranger would trip over: modules without a word, links that lead nowhere, names that nobody documented."""

import ast
import re
import subprocess
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.metrics import MetricWrapperBase

from pointsman.contracts.codec import NEVER_DECIDED, LogEvent
from pointsman.contracts.permissions import BusRole, BusUser, permissions_of
from pointsman.contracts.subjects import covers, subject_of
from pointsman.primitives import PoolName
from pointsman.runtime import telemetry
from pointsman.runtime.bounded_metrics import Bounded
from tests.golden.samples import EVENTS
from tests.tidy.pages import FENCE, PAGES, ROOT

MODULES = sorted([*ROOT.glob("shared/**/*.py"), *ROOT.glob("services/**/*.py")])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
ERROR_CODE = re.compile(r"""\b[45]\d\d(?:,|: \()\s*"([a-z_]+)",""")
METRIC_LABELS = re.compile(r"`(pointsman_\w+)` \(((?:\[[^]]*\]\([^)]*\)|[^)])*)\)")
LABEL_VALUES = re.compile(r"`(\w+)`: (.*?)(?=, `\w+`:|;|$)")
NAMED_LABEL = re.compile(r"`(\w+)`")
NAMED_ELSEWHERE = {"quantile", "side", "step"}
"""Labels of several rows, and one with as many values as there are steps."""
EVENT_ROW = re.compile(
    r"^\| \[(\w+)\]\(#(\w+)\) \| ([^|]*) \| [^|]* \| ([^|]*) \| [^|]*`pointsman [^|]* \|$", re.MULTILINE
)
"""Name, anchor, writers and fields of an event in docs/events.md; a command shows it."""
EVENT_SECTION = re.compile(r"^### (\w+)$", re.MULTILINE)
NAMED_FIELD = re.compile(r"`(\w+)`(?: \(([^)]*)\))?")
"""A field and its unit."""
POOL = PoolName("default")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

DECLARED = {
    f"{family.name}_total" if family.type == "counter" else family.name: metric
    for metric in vars(telemetry).values()
    if isinstance(metric, Bounded)
    for family in metric.describe()
}


def test_every_module_says_what_it_is() -> None:
    assert MODULES
    assert [
        str(module.relative_to(ROOT)) for module in MODULES if not ast.get_docstring(ast.parse(module.read_text()))
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [(match[1], match[2] or "") for match in LINK.finditer(page.read_text()) if "://" not in match[1]]

    missing = [path for path, _ in links if not (page.parent / path).exists()]
    targets = [
        (page.parent / path if path else page, anchor) for path, anchor in links if anchor and path not in missing
    ]

    assert (missing, [anchor for target, anchor in targets if anchor not in anchors(target)]) == ([], [])


def anchors(page: Path) -> set[str]:
    """Fragments by which the headings of a page are reached, as GitHub forms them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)).strip().lower().replace(" ", "-")
        for h in headings
    }


def test_every_event_and_field_is_documented() -> None:
    page = (ROOT / "docs/events.md").read_text()

    missing = [
        f"{event.__name__}.{field.encode_name}"
        for event in get_args(LogEvent)
        for field in msgspec.structs.fields(event)
        if field.name not in {"at", "stamp"} and f"`{field.encode_name}`" not in section(page, event.__name__)
    ]

    assert not missing, "docs/events.md does not have these in the section of their event"


def section(page: str, name: str) -> str:
    """The part of docs/events.md under the heading of one event."""
    _, _, rest = page.partition(f"\n### {name}\n")
    return rest.partition("\n### ")[0]


def test_the_table_of_events_has_a_line_for_each_in_the_order_of_the_sections() -> None:
    page = (ROOT / "docs/events.md").read_text()
    listed = [name for name, *_ in EVENT_ROW.findall(page)]

    assert listed == EVENT_SECTION.findall(page)
    assert sorted(listed) == sorted(event.__name__ for event in get_args(LogEvent))


@pytest.mark.parametrize("event", get_args(LogEvent), ids=lambda event: event.__name__)
def test_the_table_of_events_names_fields_with_units_and_who_may_write_it(event: type[LogEvent]) -> None:
    rows = EVENT_ROW.findall((ROOT / "docs/events.md").read_text())
    _, anchor, writers, named = next(row for row in rows if row[0] == event.__name__)
    struct = msgspec.inspect.type_info(event)
    assert isinstance(struct, msgspec.inspect.StructType)
    fields = {field.encode_name: field.type for field in struct.fields}
    told = dict(NAMED_FIELD.findall(named))

    assert anchor == event.__name__.lower()
    assert told
    assert [name for name in told if name not in fields] == []
    assert [
        name for name, unit in told.items() if isinstance(fields[name], msgspec.inspect.FloatType) and not unit
    ] == []
    assert {writer for writer in writers.split(", ") if not may_write(writer, event)} == set()


def may_write(writer: str, event: type[LogEvent]) -> bool:
    """Whether NATS lets it publish where the event belongs, and the codec lets a leader decide it."""
    if writer == "leader" and issubclass(event, NEVER_DECIDED):
        return False
    sample = next(sample for sample in EVENTS if type(sample) is event)
    user = BusUser(BusRole.SCHEDULER if writer == "leader" else BusRole(writer), getattr(sample, "instance", ""))
    subject = subject_of(POOL, sample)
    return any(covers(pattern, subject) for pattern in permissions_of(user, [POOL]).publish)


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    declared = [metric for metric in vars(telemetry).values() if isinstance(metric, MetricWrapperBase)]
    names = {family.name for metric in declared for family in metric.describe()}

    assert {name for name in names if f"`{name}" not in page} == set()


def test_the_labels_of_every_metric_are_documented_with_their_values() -> None:
    rows = (ROOT / "docs/monitoring.md").read_text().splitlines()
    found = [(row, *match) for row in rows for match in METRIC_LABELS.findall(row.partition(" | ")[0])]

    assert {name for _, name, _ in found if name in DECLARED} > {"pointsman_engines", "pointsman_migration_plans_total"}
    assert [one for row, name, labels in found if name in DECLARED for one in wrong_labels(row, name, labels)] == []


def wrong_labels(row: str, name: str, told: str) -> list[str]:
    """Of a metric's row in docs/monitoring.md. `told`: labels, with all their values or none; a list with "or" is open."""
    metric = DECLARED[name]
    labels = {*NAMED_LABEL.findall(told)} | ({"pool", "engine"} if told.startswith("e") else set())
    lists = {label: {one.strip("`") for one in values.split(", ")} for label, values in LABEL_VALUES.findall(told)}
    wrong = [f"{name}: no label {label}" for label in set(metric._labelnames) - labels]
    for label, values in metric.values.items():
        listed = lists.get(label)
        if listed is None and label not in NAMED_ELSEWHERE:
            wrong += [f"{name}: {label} can be {value}" for value in values if f"`{value}`" not in row]
        elif listed is not None and not any(one.startswith("or ") for one in listed) and listed != {*values}:
            wrong.append(f"{name}: {label} differs in {sorted(listed ^ {*values})}")
    return wrong


def test_every_code_of_an_ingress_error_is_in_the_table_of_clients() -> None:
    ingress = ROOT / "services/ingress/pointsman_ingress"
    sources = (ingress / "http/errors.py", ingress / "app.py", ROOT / "shared/pointsman/runtime/http_protocol.py")
    codes = {code for source in sources for code in ERROR_CODE.findall(source.read_text())}
    page = (ROOT / "docs/clients.md").read_text()

    assert {"head_timeout", "malformed", "method_not_allowed", "not_found", "request_timeout"} <= codes
    assert sorted(code for code in codes if f"`{code}`" not in page) == []


def test_every_service_has_a_readme() -> None:
    services = [path for path in (ROOT / "services").iterdir() if path.is_dir()]

    assert [s.name for s in services if not (s / "README.md").exists()] == []


def test_lock_files_name_no_host() -> None:
    locks = list((ROOT / "deploy").glob("requirements*.txt"))

    assert locks
    assert [lock.name for lock in locks if "://" in lock.read_text()] == []


def test_tracked_files_do_not_name_the_folder_they_happen_to_lie_in() -> None:
    home = f"{ROOT}/"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]

    assert [f.name for f in files if f.is_file() and home in f.read_text(errors="replace")] == []


def test_make_test_runs_alone_every_module_with_a_test_that_measures_time() -> None:
    named = re.search(r"^QUIET := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = [path for path in ROOT.glob("tests/**/*.py") if re.search(r"\bmark\.quiet\b", path.read_text())]

    assert named is not None
    assert named[1].split() == sorted(str(path.relative_to(ROOT)) for path in marked)
