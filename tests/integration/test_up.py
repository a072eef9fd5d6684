"""What `pointsman up` starts, what it refuses before that, and how it runs its processes; `test_up_fleet.py` has whole fleets."""

import asyncio
import errno
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console
from typing_extensions import override

from pointsman.adapters.tcp_ports import free_ports, why_taken
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Reply
from pointsman.primitives import PoolName
from pointsman.runtime.settings import ENVIRONMENT_PREFIX, FleetSettings, options
from pointsman_cli.command_client import connected_link
from pointsman_cli.main import main as pointsman
from pointsman_cli.up.addresses import EngineAddress
from pointsman_cli.up.child import ChildProcess
from pointsman_cli.up.command import check_pools, run_fleet
from pointsman_cli.up.process_checks import check_processes
from pointsman_cli.up.processes import SOCKET_PATH_MAX, processes
from pointsman_cli.up.runner import STOP_STAGES, Condition, FleetRunner, FleetStartError
from pointsman_cli.up.scripts import console_script, settings_type_of
from pointsman_cli.up.session import written_to
from pointsman_cli.up.settings import UpSettings, checked
from pointsman_cli.vllm_cpu.home import EngineHome
from pointsman_engine_sim.kv_connector import parse_kv_transfer_config
from tests.support.events import fleet_described
from tests.support.nats import running_nats
from tests.support.up import START_SECONDS_MAX, plan_of, pointsman_up
from tests.support.waiting import eventually

GONE_SECONDS_MAX = 20.0
pytestmark = pytest.mark.usefixtures("hang_ups_end_processes")


# The plan: what is started, and what it is told


def test_everything_that_up_tells_a_process_is_a_setting_of_that_process_with_a_value_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ("scheduler.admission=none", "scheduler.order=fcfs", "scheduler.rebind=true", "rebalancer.rebind=true")
    asked = UpSettings(policy="round_robin", kv_blocks=100, block_tokens=96, slo_ttft=3.0, set=own)
    for process in processes(plan_of(asked)):
        with monkeypatch.context() as patched:
            for name, value in process.environment.items():
                patched.setenv(name, value)
            command = click.Command(process.script, params=list(options(settings_type_of(process.script))))
            accepted = command.make_context(process.script, list(process.arguments)).params

        told = {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in process.environment}
        assert told <= set(accepted), process.name


def test_set_gives_a_service_its_option_and_a_policy_setting_goes_to_the_service_of_the_policy() -> None:
    own = (
        "scheduler.rebind=true",
        "rebalancer.rebind=true",
        "ingress.forward_tenant=false",
        "rebalance.waste_weight=2",
    )
    asked, unasked = ({p.name: p.arguments for p in processes(plan_of(UpSettings(set=s)))} for s in (own, ()))

    assert {name for name, arguments in asked.items() if "--rebind" in arguments} == {"scheduler", "rebalancer"}
    assert asked["rebalancer"] == ("--rebind", "--set", "rebalance.waste_weight=2")
    assert asked["ingress"] == ("--no-forward-tenant",)
    assert not any("--rebind" in arguments for arguments in unasked.values())


def test_the_engines_key_reaches_those_who_ask_engines_and_those_who_start_workers_and_nobody_else() -> None:
    planned = list(processes(plan_of(UpSettings(instances="1..2", engine_api_key="sk-1"))))
    planned += processes(plan_of(UpSettings(instances="1", engine_api_key="sk-1")))

    knowing = {process.role for process in planned if process.environment.get("POINTSMAN_ENGINE_API_KEY") == "sk-1"}
    assert knowing == {"ingress", "worker", "scaler"}
    unset = processes(plan_of(UpSettings(instances="1")))
    assert not any("POINTSMAN_ENGINE_API_KEY" in process.environment for process in unset), (
        "its table would be overruled"
    )


def test_each_ingress_has_a_port_of_its_own() -> None:
    plan = replace(plan_of(UpSettings(ingresses=3, schedulers=2, port=9000)), ingress_ports=(9000, 9001, 9002))
    planned = {process.name: process for process in processes(plan)}

    ingresses = [planned[name] for name in ("ingress", "ingress-2", "ingress-3")]
    assert [ingress.environment["POINTSMAN_PORT"] for ingress in ingresses] == ["9000", "9001", "9002"]
    assert [ingress.url for ingress in ingresses] == [f"http://127.0.0.1:{port}" for port in (9000, 9001, 9002)]
    ports = [process.environment["POINTSMAN_PORT"] for process in planned.values() if process.role != "engine"]
    assert len(ports) == len(set(ports))


def test_whatever_is_started_has_a_stage_in_which_it_stops() -> None:
    plan = replace(plan_of(UpSettings(instances="2")), console_port=8090)

    started = {process.role for process in processes(plan)}

    assert "console" in started
    assert started - {"engine"} <= frozenset.union(*STOP_STAGES)


def test_no_process_takes_the_set_of_up_for_its_own() -> None:
    for process in processes(plan_of(UpSettings(instances="1"))):
        inherited = process.environment_in({"POINTSMAN_SET": "scheduler.admission=none", "PATH": "/bin"})
        assert "POINTSMAN_SET" not in inherited
        assert inherited["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:80"), ("::", "http://[::1]:80"), ("0.0.0.0", "http://127.0.0.1:80")]
)
def test_the_address_that_is_told_is_one_that_works(host: str, url: str) -> None:
    assert plan_of(UpSettings(host=host)).ingress_url_at(80) == url


def test_a_console_has_no_secret_and_its_own_port() -> None:
    plan = replace(plan_of(UpSettings(instances="1")), console_port=8090)

    (console,) = [process for process in processes(plan) if process.role == "console"]

    assert console.url == "http://127.0.0.1:8090"
    assert "s" not in console.environment.values(), "the secret of the plan"
    assert not [process for process in processes(plan_of(UpSettings(instances="1"))) if process.role == "console"]


def test_each_engine_has_a_worker_that_listens_where_the_engine_publishes() -> None:
    planned = {process.name: process for process in processes(plan_of(UpSettings(instances="2")))}

    for number in (1, 2):
        engine, worker = planned[f"engine-{number}"], planned[f"worker-{number}"]
        events = json.loads(engine.arguments[engine.arguments.index("--kv-events-config") + 1])
        assert worker.environment["POINTSMAN_ENGINE_URL"] == engine.url
        assert worker.environment["POINTSMAN_KV_ENDPOINT"] == events["endpoint"]
        assert worker.environment["POINTSMAN_KV_REPLAY_ENDPOINT"] == events["replay_endpoint"]
        assert len(events["replay_endpoint"].removeprefix("ipc://")) <= SOCKET_PATH_MAX


def test_engines_that_only_prefill_or_decode_have_a_connector_and_workers_that_say_so() -> None:
    planned = {process.name: process for process in processes(plan_of(UpSettings(split="1+2")))}

    roles = [planned[f"worker-{number}"].environment["POINTSMAN_ROLE"] for number in (1, 2, 3)]
    assert roles == ["prefill", "decode", "decode"]
    for number in (1, 2, 3):
        said = planned[f"engine-{number}"].arguments
        assert parse_kv_transfer_config(said[said.index("--kv-transfer-config") + 1])
        speed = planned[f"worker-{number}"].environment["POINTSMAN_KV_TRANSFER_GB_PER_S"]
        assert said[said.index("--kv-transfer-gb-per-s") + 1] == speed

    joined = checked(UpSettings(engine="http://a:8000#role=prefill,http://b:8000#role=decode&kv=5557,http://c:8000"))
    assert [engine.role for engine in joined] == ["prefill", "decode", "both"]


def test_engines_named_by_url_get_workers_and_are_not_started() -> None:
    settings = UpSettings(engine="http://a:8000#kv=tcp://a:5557&replay=tcp://a:5558, http://b:8000/")

    engines = checked(settings)
    planned = processes(plan_of(settings, *engines))

    assert engines == [EngineAddress("http://a:8000", "tcp://a:5557", "tcp://a:5558"), EngineAddress("http://b:8000")]
    assert [process.name for process in planned if process.role in {"engine", "worker"}] == ["worker-1", "worker-2"]
    assert "POINTSMAN_TOKENIZER" not in planned[1].environment


def test_a_mere_port_is_one_of_the_engines_own_host() -> None:
    (engine,) = checked(UpSettings(engine="http://[::1]:8000#kv=5557&replay=5558"))

    assert (engine.kv_endpoint, engine.kv_replay_endpoint) == ("tcp://[::1]:5557", "tcp://[::1]:5558")


def test_the_cpu_engine_and_the_ingress_have_the_same_tokenizer_and_the_worker_the_engines_sockets() -> None:
    home = EngineHome(Path("/home"))
    settings = UpSettings(engine="vllm", instances="1", engine_args="--num-gpu-blocks-override 64")
    planned = {process.name: process for process in processes(replace(plan_of(settings), home=home))}

    engine, worker = planned["engine-1"], planned["worker-1"]
    command = [engine.script, *engine.arguments]
    events = json.loads(command[command.index("--kv-events-config") + 1])
    assert engine.foreign
    assert (
        command[command.index("serve") + 1] == planned["ingress"].environment["POINTSMAN_TOKENIZER"] == str(home.model)
    )
    assert command[-2:] == ["--num-gpu-blocks-override", "64"]
    assert worker.environment["POINTSMAN_KV_ENDPOINT"] == events["endpoint"]
    assert int(worker.environment["POINTSMAN_BLOCK_TOKENS"]) == int(command[command.index("--block-size") + 1])


@pytest.mark.parametrize(
    ("template", "endpoint"),
    [
        ("python3 -m engine --port {port} --events {kv}", "ipc:///run/p/engine-1.kv"),
        ("python3 -m engine --port {port} --events-config {kv_events}", "ipc:///run/p/engine-1.kv"),
        ("python3 -m engine --port {port} --events tcp://*:{kv_port}", "tcp://127.0.0.1:{}"),
        ("python3 -m engine --port {port}", ""),
    ],
)
def test_a_command_template_is_filled_in_and_the_worker_listens_where_it_says(template: str, endpoint: str) -> None:
    settings = UpSettings(engine_command=template, instances="1")
    planned = {process.name: process for process in processes(plan_of(settings))}

    engine, worker = planned["engine-1"], planned["worker-1"]
    assert engine.url.endswith(f":{engine.arguments[3]}")
    published = engine.arguments[-1].rpartition(":")[2]
    assert worker.environment["POINTSMAN_KV_ENDPOINT"] == endpoint.format(published)
    assert "POINTSMAN_TOKENIZER" not in planned["ingress"].environment
    assert not [argument for argument in engine.arguments if re.search(r"\{\w+\}", argument)]


@pytest.mark.parametrize(
    "settings",
    [
        UpSettings(engine="tpu"),
        UpSettings(engine="http://a:8000#kv=a:5557"),
        UpSettings(engine="http://[::1:8000"),
        UpSettings(engine="http://a:80x0"),
        UpSettings(engine="http://a:8000", engine_args="--seed 1"),
        UpSettings(engine_args="--seed 1 --port=9000"),
        UpSettings(engine_args="--speed 3"),
        UpSettings(engine="vllm", engine_command="python3 --port {port}"),
        UpSettings(engine_command="no-such-program --port {port}"),
        UpSettings(engine_command="python3 without-a-port"),
        UpSettings(engine_command="python3 {model} {port}"),
        UpSettings(engine_command="python3 {port}", instances="1..2"),
        UpSettings(engine_command="python3 'left open {port}"),
        UpSettings(engine="http://a:8000#zmq=tcp://a:1"),
        UpSettings(engine="http://a:8000#role=cook"),
        UpSettings(engine="http://a:8000", split="1+1"),
        UpSettings(split="1"),
        UpSettings(split="1+2", instances="1..2"),
        UpSettings(split="1+1", instances="3..4"),
        UpSettings(instances="0"),
        UpSettings(port=65_535, ingresses=2),
        UpSettings(tokenizer="/no/such/directory"),
        UpSettings(set=("cook.x=1",)),
        UpSettings(set=("nats.sync_interval=often",)),
        UpSettings(set=("scheduler",)),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(settings: UpSettings) -> None:
    with pytest.raises(click.BadParameter):
        checked(settings)


# What the processes would refuse


def check(settings: UpSettings, config: Path | None = None) -> list[str]:
    plan = replace(plan_of(settings), config=config, console_port=8090)
    return check_processes(plan, processes(plan))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("POINTSMAN_ADMIN_PORT", "9000", ["POINTSMAN_ADMIN_PORT"]),
        ("POINTSMAN_SLO_TTFT_SECONDS", "3", ["POINTSMAN_SLO_TTFT_SECONDS (set POINTSMAN_SLO_TTFT)"]),
        ("POINTSMAN_ENGINE_URL", "http://a:1", ["POINTSMAN_ENGINE_URL (set POINTSMAN_ENGINE)"]),
        ("POINTSMAN_ARCHIVE_URL_FILE", "/dev/null", ["POINTSMAN_ARCHIVE_URL_FILE"]),
        ("POINTSMAN_MAX_MODEL_LEN", "4096", ["POINTSMAN_MAX_MODEL_LEN"]),  # engines inherit no settings
        ("POINTSMAN_SLO_TTFT", "3", []),
        ("POINTSMAN_PORT", "9000", []),
        ("POINTSMAN_HOLD_SECONDS", "3", []),
        ("POINTSMAN_LEASE_SECONDS", "3", []),
        ("POINTSMAN_LOG_LEVEL", "debug", []),
        ("POINTSMAN_ENGINE_API_KEY_FILE", "/proc/sys/kernel/ostype", []),
        ("POINTSMAN_VLLM_EVICTION", "rlt", []),
        ("HOME", "/", []),
    ],
)
def test_variables_that_reach_no_process_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: list[str]
) -> None:
    monkeypatch.setenv(variable, value)

    assert check(UpSettings()) == said


def test_a_variable_that_only_a_scaled_fleet_decides_is_named_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_HOLD_SECONDS", "3")

    assert check(UpSettings(instances="1..2")) == ["POINTSMAN_HOLD_SECONDS"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("scheduler.nosuch=1", "scheduler: No such option"),
        ("scheduler.policy=nosuch", "scheduler: Invalid value for '--policy'"),
        ("routing.nosuch=1", "scheduler: .* there is no setting of pointsman nosuch"),
        ("routing.displaced_max=nan", "scheduler: .* displaced_max must be"),
        ("rebalance.nosuch=1", "rebalancer: .* nosuch"),
        ("scaling.nosuch=1", "scaler: .* nosuch"),
        ("scaler.min_instances=9", "scaler: .*--max-instances"),
        ("worker.flush_ms=-1", "worker-1: Invalid value for '--flush-ms'"),
        ("worker.data_parallel_size=5000", "worker-1: .*1 to 1024"),
        ("ingress.oidc_audience=pointsman", "ingress: .* need --oidc-issuer"),
        ("recorder.archive_days=-1", "recorder: Invalid value for '--archive-days'"),
        ("ingress.retries_max=-1", "ingress: Invalid value for '--retries-max'"),
        ("console.nosuch=1", "console: No such option"),
        ("ingress.port=9000", r"decides ingress\.port itself; use --port"),
        ("ingress.host=0.0.0.0", "decides ingress.host itself; use --host"),
        ("ingress.admin-port=9000", "decides ingress.admin_port itself; leave it out"),
        ("ingress.slo_ttft_seconds=2", "use --slo-ttft"),
        ("console.port=9000", "use --console-port"),
        ("console.host=0.0.0.0", "decides console.host itself; leave it out"),
        ("scheduler.port=9000", "decides scheduler.port itself; leave it out"),
        ("scheduler.pool=other", "use --pool"),
        ("scheduler.speed=3", "use --speed"),
        ("worker.nats=nats://127.0.0.1:4222", "use --nats"),
        ("worker.engine_url=http://127.0.0.1:1", "use --engine"),
        ("scaler.secret=abcdefghijklmnopqrstuvwxyz", "use --secret"),
        ("rebalancer.block_tokens=32", "use --block-tokens"),
    ],
)
def test_a_set_that_a_process_would_refuse_is_refused_before_any_starts(text: str, complaint: str) -> None:
    with pytest.raises(click.UsageError, match=complaint):
        check(UpSettings(instances="2", set=(text,)))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('[scheduler]\npolicy = "nosuch"', r"scheduler: .*fleet\.toml: policy: 'nosuch' is not one of"),
        ("[engine-sim]\nblock = 3", "engine-1: .* has no setting block; did you mean block_size?"),
        ("[ingress]\nslo_ttft_seconds = 3", r"decides \[ingress\] slo_ttft_seconds itself; set slo_ttft in \[up\]"),
        ("slo_ttft_seconds = 3", r"decides slo_ttft_seconds itself; set slo_ttft in \[up\]"),
        ("[ingress]\nport = 3", r"decides \[ingress\] port itself; set port in \[up\]"),
        ("[scheduler]\nport = 3", r"decides \[scheduler\] port itself; leave it out"),
        ("[engine-sim]\nspeed = 3", r"decides \[engine-sim\] speed itself; set speed in \[up\]"),
    ],
)
def test_a_file_that_a_process_would_refuse_or_not_follow_is_refused_before_any_starts(
    tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "fleet.toml").write_text(content)

    with pytest.raises(click.UsageError, match=complaint):
        check(UpSettings(), tmp_path / "fleet.toml")


def test_a_set_that_the_size_of_a_scaled_fleet_decides_is_refused_and_its_policy_is_not() -> None:
    with pytest.raises(click.UsageError, match=r"decides scaler\.max_instances itself; use --instances"):
        check(UpSettings(instances="1..2", set=("scaler.max_instances=3",)))

    check(UpSettings(instances="1..2", set=("scaler.scaling=manual", "ingress.hold_seconds=3")))
    check(UpSettings(instances="1", set=("scaler.max_instances=3",)))


def test_what_the_processes_take_is_not_refused(tmp_path: Path) -> None:
    tables = (
        "[ingress]\nrequire_keys = true\n[scheduler]\nrunning_max = 9\n[engine-sim]\nmax_model_len = 4096\n[console]\n"
    )
    (tmp_path / "fleet.toml").write_text('pool = "default"\nport = 9000\nspeed = 2.0\n' + tables)
    before = dict(os.environ)

    check(UpSettings(set=("routing.displaced_max=2", "ingress.processes=2")), tmp_path / "fleet.toml")

    assert dict(os.environ) == before


# The runner, with children that take no time


class Script(ChildProcess):
    """A child that runs a line of Python, ready as soon as it runs."""

    def __init__(self, directory: Path, code: str, role: str = "worker") -> None:
        super().__init__(name="child", role=role, url="", log_file=directory / "child.log")
        self._code = code

    @override
    async def start(self) -> None:
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", self._code], stdout=log, stderr=log, process_group=0)

    @override
    async def is_ready(self) -> bool:
        return self.exit_code is None and "ready" in self.log_file.read_text()


def runner_of(*children: ChildProcess) -> tuple[FleetRunner, list[str]]:
    said: list[str] = []
    return FleetRunner(children, report=lambda line, _: said.append(line), changed=lambda: None), said


async def test_a_process_that_cannot_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    runner, _ = runner_of(Script(tmp_path, "print('no such disk'); raise SystemExit(3)"))

    with pytest.raises(FleetStartError, match="child ended with exit code 3 before it was ready") as caught:
        await runner.start(seconds_max=10)

    assert caught.value.tail == ["no such disk"]


async def test_the_end_of_a_log_is_of_this_run(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text("of the run before\n" * 3)
    runner, _ = runner_of(Script(tmp_path, "print('no such disk'); raise SystemExit(3)"))

    with pytest.raises(FleetStartError) as caught:
        await runner.start(seconds_max=10)

    assert caught.value.tail == ["no such disk"]


async def test_a_process_that_dies_while_others_still_start_ends_the_start(tmp_path: Path) -> None:
    late = Script(tmp_path, "import time; time.sleep(60)")
    end = tmp_path / "end"
    waits = f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)"
    early = Script(tmp_path, f"import pathlib, time; print('ready', flush=True)\n{waits}")
    late.name, late.log_file = "late", tmp_path / "late.log"
    runner, _ = runner_of(late, early)

    starting = asyncio.create_task(runner.start(seconds_max=10))
    await eventually(lambda: runner.conditions[early.name] is Condition.READY)
    end.touch()
    with pytest.raises(FleetStartError, match="child ended with exit code 0 while others were starting"):
        await starting
    await runner.stop()


async def test_a_process_that_keeps_dying_is_started_again_ever_more_slowly_until_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.adapters.backoff.FIRST_RESTART_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("pointsman.adapters.backoff.RESTART_WAIT_SECONDS_MAX", 0.04)
    monkeypatch.setattr("pointsman_cli.up.runner.RESTART_WAIT_SECONDS_MAX", 0.04)
    cure = tmp_path / "cure"
    child = Script(
        tmp_path,
        f"import pathlib, time; print('ready', flush=True); pathlib.Path({str(cure)!r}).exists() and time.sleep(60)",
    )
    runner, said = runner_of(child)
    await child.start()
    keeping = asyncio.create_task(runner.keep())

    await eventually(lambda: sum("was started again" in line for line in said) >= 8)
    cure.touch()
    await eventually(lambda: child.exit_code is None and "was started again" in said[-1])
    await runner.stop()
    await keeping

    waits = [line.rpartition(", ")[2] for line in said if "was started again" in line]
    assert waits[:3] == ["0.01 s later", "0.02 s later", "0.04 s later"]
    assert set(waits[3:]) == {"0.04 s later"}
    assert "✗ child keeps dying: it is started again every 0.04 s" in said
    assert not any("stays down" in line for line in said)


async def test_an_ingress_that_still_streams_when_the_fleet_stops_gets_a_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_cli.up.runner.STREAMS_SECONDS_MAX", 1.0)
    child = Script(tmp_path, STREAMS, role="ingress")
    runner, said = runner_of(child)
    await runner.start(seconds_max=10)

    await runner.stop()

    assert child.exit_code == 7
    assert not any("killed" in line for line in said)


STREAMS = """
import signal, time
def second(*_): raise SystemExit(7)
signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, second))
print('ready', flush=True)
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


async def test_who_hangs_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_cli.up.runner.STAGE_SECONDS_MAX", 0.1)
    child = Script(tmp_path, DEAF, role="nats")
    runner, said = runner_of(child)
    await runner.start(seconds_max=10)

    await runner.stop()

    assert child.exit_code == -signal.SIGKILL
    assert said[-1] == "killed, for not stopping within 0.1 s: child"


@pytest.mark.parametrize(
    "form", ["log_writes_lost    count={} reason=x", '{{"count": {}, "event": "log_writes_lost"}}']
)
async def test_writes_that_a_child_lost_when_it_was_stopped_are_counted_and_no_earlier_ones(
    tmp_path: Path, form: str
) -> None:
    code = f"""
import signal, time
def stop(*_): print({form.format(17)!r}, flush=True); raise SystemExit
signal.signal(signal.SIGTERM, stop)
print({form.format(400)!r}, 'ready', flush=True)
time.sleep(60)
"""
    child = Script(tmp_path, code)
    runner, _ = runner_of(child)
    await runner.start(seconds_max=10)
    before = child.writes_lost_at_stop()
    await runner.stop()

    assert (before, child.writes_lost_at_stop()) == (0, 17)


async def test_who_takes_long_to_stop_is_named_and_waited_for_until_told_to_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_cli.up.runner.STILL_STOPPING_SECONDS", 0.05)
    child = Script(tmp_path, DEAF, role="ingress")
    told = asyncio.Event()
    runner = FleetRunner([child], report=lambda line, _: told.set() if " s: child" in line else None, changed=print)
    await runner.start(seconds_max=10)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        stopping = group.create_task(runner.stop())
        await told.wait()
        waited_for = child.exit_code is None and not stopping.done()
        runner.kill()

    assert waited_for
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("end", ["stops", "dies"])
async def test_what_a_script_leaves_running_ends_with_it(tmp_path: Path, end: str) -> None:
    left = tmp_path / "left"
    script = f"import subprocess, pathlib, time; p = subprocess.Popen(['sleep', '60']); pathlib.Path({str(left)!r})"
    child = Script(tmp_path, script + ".write_text(str(p.pid)); print('ready', flush=True); time.sleep(60)", "engine")
    runner, _ = runner_of(child)
    await runner.start(seconds_max=10)

    if end == "stops":
        await runner.stop()
    else:
        os.kill(child.pid, signal.SIGKILL)
        await child.exited()

    assert gone([int(left.read_text())])


@pytest.mark.parametrize("niceness", [0, 19])
def test_a_fleet_that_was_started_nicely_is_no_less_nice(niceness: int, tmp_path: Path) -> None:
    """Only root may lower a niceness."""
    script = f"""
import asyncio, os, pathlib
from pointsman_cli.up.child import ServiceProcess
from pointsman_cli.up.plan import ProcessPlan
plan = ProcessPlan(name="x", role="x", script="sleep", arguments=("60",), url="", environment={{}}, niceness={niceness}, foreign=True)
child = ServiceProcess(plan, pathlib.Path({str(tmp_path)!r}))
asyncio.run(child.start())
print(os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, child.pid))
child.kill()
"""
    ran = subprocess.run(["nice", "-n", "5", sys.executable, "-c", script], capture_output=True, text=True, check=True)

    own, of_child = map(int, ran.stdout.split())
    assert own > 0
    assert of_child == max(own, niceness)


# What is refused


def test_a_taken_port_is_named_with_the_flag_that_changes_it(tmp_path: Path) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    with server:
        refused = up_fails(tmp_path, "--port", str(server.server_port))

    why = "Address already in use; choose another one with --port"
    assert f"port {server.server_port} on 127.0.0.1 cannot be had: {why}" in refused


def test_an_address_that_is_not_of_this_machine_is_not_called_a_taken_port(tmp_path: Path) -> None:
    assert "cannot listen on 192.0.2.1 here" in up_fails(tmp_path, "--host", "192.0.2.1")


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    said = f"cannot write to {tmp_path}: no room; make room there"
    with pytest.raises(click.ClickException, match=said), written_to(tmp_path):
        raise OSError(errno.ENOSPC, "no room")


def test_a_data_directory_that_cannot_be_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused = up_fails(tmp_path, "--data", str(file / "below"))

    assert f"{file / 'below'} cannot be the data directory: Not a directory; name another with --data DIR" in refused
    assert "Traceback" not in refused


async def test_no_fleet_is_started_where_there_is_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_cli.up.command.ROOM_BYTES_MIN", 1 << 60)

    with pytest.raises(click.ClickException, match=r"KiB are free where .* make room there, or name another directory"):
        await run_fleet(UpSettings(port=0), tmp_path / "data", None, Console())


def test_a_temporary_directory_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    plan = replace(plan_of(UpSettings(instances="1")), runtime=tmp_path / ("x" * SOCKET_PATH_MAX))

    with pytest.raises(click.ClickException, match="set TMPDIR to a shorter directory"):
        processes(plan)


def test_a_seed_that_is_none_is_named_by_those_who_read_it(tmp_path: Path) -> None:
    credentials = tmp_path / "data" / "credentials"
    credentials.mkdir(parents=True)
    (credentials / "reader.nk").touch()
    made = CliRunner().invoke(pointsman, ["credentials", "--directory", str(credentials)])
    assert (made.exit_code, made.output.count("\n")) == (1, 1)
    for told in (made.output, up_fails(tmp_path, "--instances", "1")):
        assert "reader.nk holds no seed: put it back, or delete it to have another one made" in told
        assert "Traceback" not in told


def test_an_engine_whose_blocks_do_not_fit_the_keys_is_told_of_in_a_line(tmp_path: Path) -> None:
    port, kv = free_ports(2)
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{kv}"}
    with simulated_engine(port, "--block-size", "128", "--kv-events-config", json.dumps(events)):
        refused = up_fails(tmp_path, "--engine", f"http://127.0.0.1:{port}#kv={kv}")

    assert "Error: --block-tokens does not fit this engine: block keys stand for 64 tokens" in refused
    assert "Traceback" not in refused


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    assert "the engine http://127.0.0.1:9 is of no use" in up_fails(tmp_path, "--engine", "http://127.0.0.1:9")


def test_a_nats_that_does_not_answer_is_named(tmp_path: Path) -> None:
    told = up_fails(tmp_path, "--nats", "nats://me:hunter2@127.0.0.1:9")
    assert "no nats-server answers at nats://127.0.0.1:9" in told
    assert "hunter2" not in told


async def test_a_pool_that_another_fleet_uses_is_refused_while_it_does(tmp_path: Path) -> None:
    async def on_describe(_command: AnyCommand, reply: Reply) -> None:
        await reply(fleet_described(scheduler="scheduler-77-abc"))

    async with running_nats(tmp_path / "nats") as url:
        plan = replace(plan_of(UpSettings(nats=url, also=("other=1",))), nats=url)
        await check_pools(plan)
        settings = FleetSettings(nats=url, pool="other")
        async with connected_link(settings, name="other") as link:
            async with link.commands.serve(command_subject(PoolName("other"), "fleet"), on_describe):
                told = await asyncio.to_thread(
                    up_fails, tmp_path, "--nats", url, "--instances", "1", "--also", "other=1"
                )
            await check_pools(plan)  # it has just ended

    assert "the pool 'other'" in told
    assert "is in use: scheduler-77-abc leads it" in told
    assert "--pool" in told


@pytest.mark.parametrize(("content", "reason"), [("", "must not be empty"), ("s" * 65, "has 65 bytes")])
def test_a_file_without_a_secret_is_named_and_left_as_it_is(tmp_path: Path, content: str, reason: str) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "secret").write_text(content)

    told = up_fails(tmp_path, "--instances", "1")
    assert f"{data / 'secret'} holds no secret" in told
    assert reason in told
    assert "restore it from the backup" in told
    assert (data / "secret").read_text() == content


def up_fails(directory: Path, *arguments: str) -> str:
    with pointsman_up(directory, *arguments) as up:
        up.process.wait(START_SECONDS_MAX)
        assert up.process.returncode == 1, up.output
        return " ".join(up.output.split())


@contextmanager
def simulated_engine(port: int, *flags: str) -> Iterator[None]:
    """An engine that answers at this port, and knows nothing of any `up`."""
    command = [str(console_script("pointsman-engine-sim")), "--port", str(port), "--speed", "50", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while not why_taken(port):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def gone(pids: list[int]) -> bool:
    """Whether all of them have ended, if not at once then soon."""
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while any(pid and state_of(pid) != "Z" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
