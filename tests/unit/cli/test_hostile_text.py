"""Nothing that a log, an answer or an engine says can reach a terminal, a page, a table or a picture but as plain text."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.text import Text

import pointsman_cli
from pointsman.contracts.access import ApiKey
from pointsman.contracts.commands import FleetDescribed, InstanceDescribed, ScaleAnswered
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import Epoch, InstanceId, Tenant, Term
from pointsman_cli import scale
from pointsman_cli.bench.report import errors_text
from pointsman_cli.discovery import FleetFile, FleetProcess
from pointsman_cli.fleet import fleet_table
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.sources import Header
from pointsman_cli.keys import keys_table
from pointsman_cli.main import COMMANDS, main
from pointsman_cli.tap.command import Printer
from pointsman_cli.tap.filters import Filter
from pointsman_cli.terminal import PIPE_WIDTH, SafeConsole, csv_cell, json_text, one_line, output_console, say, table
from pointsman_cli.up.display import print_fleet
from pointsman_cli.up.settings import UpSettings
from tests.support.events import fleet_described
from tests.support.hostile import FORMULA, HOSTILE, MARKUP, assert_harmless, hostile_log
from tests.support.recorded_log import RecordedFleet

REQUEST = "r-8"
OF_A_BUNDLE: dict[str, list[str]] = {
    "replay": ["--verify"],
    "state": [],
    "explain": [REQUEST],
    "doctor": [],
    "what-if": ["--policy", "round_robin"],
    "usage": [],
    "hit-rate": [],
    "export": ["{out}/again.pmlog"],
}
OTHERWISE = {
    *(
        "up",
        "console",
        "credentials",
        "fleet",
        "scale",
        "drain",
        "tenants",
        "keys",
        "tap",
        "calibrate",
        "bench",
        "simulate",
    )
}
"""Tested below, in tests/integration/test_hostile_answers.py and tests/unit/console, or without any text of others."""


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    fleet = RecordedFleet(policy_set(prefill_window_tokens=900), seed=11, failing=True).live(700)
    fleet.take_over()
    return fleet.live(700).write_all().entries


@pytest.fixture(scope="module", params=[True, False], ids=["all", "known-policies"])
def hostile(request: pytest.FixtureRequest, entries: list[LogEntry]) -> list[LogEntry]:
    return hostile_log(entries, policies_too=request.param)


@pytest.fixture
def bundle(hostile: list[LogEntry], tmp_path: Path) -> Path:
    file = tmp_path / "log.pmlog"
    header = Header(pool=HOSTILE, identity=HOSTILE, last=hostile[-1].sequence)
    write_bundle(file, header, hostile)
    return file


def run(*arguments: str, on_terminal: bool = False) -> Result:
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "150"} if on_terminal else {}
    return CliRunner().invoke(main, arguments, env=colours)


def test_every_command_is_tested_with_hostile_text() -> None:
    assert {*OF_A_BUNDLE, *OTHERWISE} == set(COMMANDS)


@pytest.mark.parametrize("command", OF_A_BUNDLE)
@pytest.mark.parametrize("on_terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_hostile_bundle_prints_as_plain_text(
    bundle: Path, command: str, on_terminal: bool, as_json: bool, tmp_path: Path
) -> None:
    more = [text.format(out=tmp_path) for text in OF_A_BUNDLE[command]]
    ran = run(command, *more, "--from", str(bundle), *(["--json"] if as_json else []), on_terminal=on_terminal)

    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    assert ran.output
    assert_harmless(ran.stdout, on_terminal=on_terminal)
    assert_harmless(ran.stderr, on_terminal=on_terminal)
    if as_json and ran.exit_code in (0, 1):
        json.loads(ran.stdout)


def test_pictures_take_hostile_names(bundle: Path, tmp_path: Path) -> None:
    ran = run("what-if", "--instances", "4", "--from", str(bundle), "--plot", str(tmp_path / "pictures"))

    assert ran.exit_code in (0, 2), ran.output
    assert_harmless(ran.output)
    if ran.exit_code == 0:  # with policies that exist
        assert list((tmp_path / "pictures").glob("*.png"))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_tap_prints_hostile_events_on_one_line_each(
    hostile: list[LogEntry], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = Printer(1.0, Filter(), as_json=as_json)
    for entry in hostile:
        printer.show(entry)
    output = capsys.readouterr().out

    assert_harmless(output)
    assert MARKUP in output
    assert len(output.splitlines()) == len(hostile)


def test_what_tap_prints_of_fields_that_nobody_knows_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    payload = (
        '{"type":"CacheCleared","at":1.0,"instance":"e","epoch":1,"sequence":1,\n"x":"\x1b[2J\x9b\u202e"}'.encode()
    )
    entry = LogEntry.read(1, "pm.default.kv.e", payload)
    Printer(1.0, Filter(), as_json=True).show(entry)
    output = capsys.readouterr().out

    assert_harmless(output)
    assert len(output.splitlines()) == 1
    assert json.loads(output)["sequence"] == 1


# --- Answers of a fleet ---


def test_fleet_and_scale_print_hostile_answers_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    instance = InstanceDescribed(
        instance=InstanceId(HOSTILE), url=HOSTILE, epoch=Epoch(1), status="unschedulable", knowledge=HOSTILE, doubt=HOSTILE,
        pending=0, in_prefill=0, decoding=0, cached_blocks=0, knowledge_reason=HOSTILE, knowledge_since=1.0,
    )  # fmt: skip
    fleet = FleetDescribed(
        pool=HOSTILE, policy=HOSTILE, admission=HOSTILE, ordering=HOSTILE, speed=1.0, scheduler=HOSTILE, term=Term(1),
        as_of=1, instances=[instance],
    )  # fmt: skip
    SafeConsole(width=200).print(fleet_table(fleet))
    answer = ScaleAnswered(
        number=1,
        wanted=1,
        ready=1,
        coming=0,
        leaving=0,
        applied=True,
        lowest=1,
        highest=1,
        reason=HOSTILE,
        policy=HOSTILE,
        provider=HOSTILE,
        trouble=HOSTILE,
        by_hand=HOSTILE,
    )
    scale.show(answer)

    output = capsys.readouterr().out
    assert_harmless(output)
    assert MARKUP in output


def test_an_address_with_brackets_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    instance = InstanceDescribed(
        instance=InstanceId("engine-1"), url="http://[fd00::5]:8000", epoch=Epoch(1), status="ready", knowledge="exact",
        pending=0, in_prefill=0, decoding=0, cached_blocks=0,
    )  # fmt: skip
    fleet = FleetDescribed(
        pool="p", policy="p", admission="a", ordering="o", speed=1.0, scheduler="s", term=Term(1), as_of=1,
        instances=[instance],
    )  # fmt: skip
    SafeConsole(width=200).print(fleet_table(fleet))

    assert "http://[fd00::5]:8000" in capsys.readouterr().out


def test_fleet_says_first_that_the_log_takes_no_writes(capsys: pytest.CaptureFixture[str]) -> None:
    console = SafeConsole(width=200)
    for seconds in (0.0, 42.0):
        console.print(fleet_table(fleet_described(unconfirmed_writes=1, unconfirmed_seconds=seconds)))

    calm, stalled = capsys.readouterr().out.split("the log has taken no writes for 42 s: 1 write of the leader")
    assert "engine-1" in calm
    assert "engine-1" in stalled


def test_keys_prints_hostile_values_of_the_store_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    key = ApiKey(
        id="k", digest=bytes(32), tenant=Tenant(HOSTILE), created_at=1e13, created_by=HOSTILE, expires_at=1e13,
        models=[HOSTILE], endpoints=[HOSTILE],
    )  # fmt: skip
    SafeConsole(width=2000).print(keys_table([key]))
    output = capsys.readouterr().out

    assert_harmless(output)
    assert MARKUP in output


@pytest.mark.parametrize(
    ("texts", "asked"), [(("ingress.require_keys=true",), True), (("ingress.require_keys=false",), False), ((), False)]
)
def test_up_tells_how_to_get_a_key_where_its_ingress_asks_for_one(
    texts: tuple[str, ...], asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FleetFile(
        nats="nats://x", ingress="http://127.0.0.1:8080", pool="default", model="m", policy="dualmap", speed=1.0,
        slo_ttft=5.0, block_tokens=64, secret_file="", data="/my data", pid=1, started_at=0.0,
    )  # fmt: skip

    print_fleet(SafeConsole(width=300), fleet, 1.0, requires_keys=UpSettings(set=texts).requires_keys)

    printed = capsys.readouterr().out
    assert ("keys create --from '/my data' me" in printed) is asked
    assert ('-H "authorization: Bearer $KEY"' in printed) is asked


def test_up_and_bench_print_hostile_answers_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    process = FleetProcess(name=HOSTILE, role="engine", pid=0, url="http://[fd00::5]:8000")
    fleet = FleetFile(
        nats="nats://x", ingress="http://[fd00::5]:8080", pool="default", model=HOSTILE, policy=HOSTILE, speed=1.0,
        slo_ttft=5.0, block_tokens=64, secret_file="", data="/tmp", pid=1, started_at=0.0, processes=[process],
    )  # fmt: skip
    console = SafeConsole(width=300)
    print_fleet(console, fleet, 1.0)
    console.print(errors_text({HOSTILE: 3}))

    output = capsys.readouterr().out
    assert_harmless(output)
    assert "http://[fd00::5]:8000" in output
    assert "http://[fd00::5]:8080/v1" in output


# --- The helper ---


def test_nothing_is_printed_past_the_helper() -> None:
    allowed = {"terminal.py", "tap/command.py", "fleet.py"}  # the latter two print what json_text made
    package = Path(pointsman_cli.__file__).parent
    printing = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search(r"(?<![.\w])print\(|click\.s?echo\(|(?<!Safe)Console\(", file.read_text())
    }

    assert {name for name in printing if not name.startswith("vllm_cpu/")} == allowed


def test_a_string_a_cell_and_a_text_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    console = SafeConsole(width=200)
    rows = table(HOSTILE, title=HOSTILE)
    rows.add_row(HOSTILE)
    rows.add_row(Text(HOSTILE))
    console.print(rows)
    console.print(HOSTILE)
    console.print(Text(HOSTILE))
    say(console, HOSTILE)

    assert_harmless(capsys.readouterr().out)


def test_json_stays_the_same_json() -> None:
    content = {HOSTILE: [HOSTILE, "\U000e0041", "añb", "漢"]}

    text = json_text(json.dumps(content, ensure_ascii=False).encode())

    assert json.loads(text) == content
    assert "añb" in text
    assert_harmless(text)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_a_table_is_a_formula(start: str) -> None:
    assert csv_cell(start + FORMULA)[0] == "'"
    assert csv_cell("tenant-1") == "tenant-1"


def test_text_that_prints_is_left_as_it_is() -> None:
    assert one_line("añb 漢 ✓ → é [red]") == "añb 漢 ✓ → é [red]"


@pytest.mark.parametrize("columns", [1, 9, 30])
@pytest.mark.parametrize("name", ["a" * 200, "b" * 5_000, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 128])
def test_a_long_name_takes_no_room_from_numbers_and_headings(
    name: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = table("tenant", *(f">tokens of {n}" for n in range(columns)))
    shown.add_row(name, *(f"{1234567 + n:,}" for n in range(columns)))
    shown.add_row("short", *(f"{n}" for n in range(columns)))
    output_console().print(shown)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    assert len(lines) == 4
    assert all(f"tokens of {n}" in lines[0] for n in range(columns))
    assert all(f" {1234567 + n:,}" in lines[2] for n in range(columns))
    assert "\N{HORIZONTAL ELLIPSIS}" in lines[2]
    assert "short" in lines[3]
    assert columns > 9 or all(len(line) <= PIPE_WIDTH for line in lines)
