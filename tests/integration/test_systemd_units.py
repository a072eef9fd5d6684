"""deploy/systemd: systemd takes the units and confines them, and our processes take what the units tell them."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from urllib.request import urlopen

import click
import pytest

from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.embedded_nats import nats_server_binary
from pointsman.runtime.settings import ENVIRONMENT_PREFIX, FILE_SUFFIX, PUBLIC_SECRET, FleetSettings, options
from pointsman_cli.console.command import console_command
from pointsman_cli.up.scripts import settings_type_of
from pointsman_scaler.settings import ScalerSettings
from pointsman_worker.settings import WorkerSettings
from tests.support.certificates import Authority
from tests.support.systemd import ROOT, UNITS, Unit, drop_ins, make_root, units

START_SECONDS_MAX = 30.0
USER_ID, GROUP_ID = 61_234, 61_999
EXPOSURE_MAX = 20
"""Tenths, of systemd's 10."""
OWN = [unit for unit in units() if unit.name not in ("pointsman-nats", "pointsman-console")]
OWN_SEEDS = {"worker": "workers/default"}
HAVE_THE_SECRET = {"pointsman-ingress", "pointsman-scheduler", "pointsman-worker"}
"""Who computes keys of blocks, salts or digests of API keys."""
HOSTS = (ROOT / "docs/hosts.md").read_text()
OF_ONE_POOL = re.compile(r"StateDirectory=|STATE_DIRECTORY=|ARCHIVE_URL=|/workers/|engines\.toml")
NOT_CALLED_A_SETTING = {"POINTSMAN_CONFIG", f"POINTSMAN_SECRET{FILE_SUFFIX}"}


@pytest.fixture(scope="module")
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd here")
    return program


def test_there_is_a_unit_for_each_service() -> None:
    assert {unit.name.removeprefix("pointsman-") for unit in units()} == {
        *("console", "ingress", "nats", "rebalancer", "recorder", "scaler", "scheduler", "worker")
    }


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.name)
def test_a_unit_gives_its_process_settings_that_it_takes(
    unit: Unit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Path(unit.command[0]).name
    assert script == unit.name
    known = options(settings_type_of(script))
    (tmp_path / "secret").write_text("a secret")
    for name, value in unit.variables.items():
        monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    content = tomllib.loads((UNITS / "pointsman.toml").read_text())
    own = content[unit.name.removeprefix("pointsman-")]
    shared = {name: value for name, value in content.items() if not isinstance(value, dict)}
    command = click.Command(script, params=list(known))
    names = {option.name for option in known}

    accepted = command.make_context(script, unit.command[1:], default_map=shared | own).params

    assert set(unit.variables) - NOT_CALLED_A_SETTING <= {ENVIRONMENT_PREFIX + str(name).upper() for name in names}
    assert set(own) <= names
    assert accepted["log_replicas"] == 3
    assert accepted.get("secret", PUBLIC_SECRET) == ("a secret" if unit.name in HAVE_THE_SECRET else PUBLIC_SECRET)
    assert Path(accepted["nats_credentials"]).name in unit.credentials


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.name)
def test_a_process_has_no_credentials_but_its_own_and_the_secret_if_it_computes_keys(unit: Unit) -> None:
    role = unit.name.removeprefix("pointsman-")
    own = {f"{role}.nk": f"/etc/pointsman/credentials/{OWN_SEEDS.get(role, role)}.nk"}
    secret = {"secret": "/etc/pointsman/credentials/secret"}

    assert unit.credentials == (own | secret if unit.name in HAVE_THE_SECRET else own)


def test_nats_server_is_started_again_whatever_its_exit_code_and_our_processes_unless_a_setting_is_wrong() -> None:
    """A panic of Go ends a process with 2, the code of a wrong setting of ours."""
    never_again = {unit.name: unit.settings.get("RestartPreventExitStatus", []) for unit in units()}

    assert {unit.settings["Restart"][-1] for unit in units()} == {"always"}
    assert never_again.pop("pointsman-nats") == []
    assert set(map(tuple, never_again.values())) == {("2",)}


def test_every_unit_starts_with_its_host() -> None:
    installs = {file.name: file.read_text().partition("[Install]")[2].split() for file in UNITS.glob("*.service")}

    assert {name: lines for name, lines in installs.items() if lines != ["WantedBy=multi-user.target"]} == {}
    assert len(installs) == len(units())


def test_a_drop_in_of_an_administrator_comes_after_ours() -> None:
    ours = [file.name for unit in units() for file in drop_ins(f"{unit.name}.service")]

    assert max(ours) < "10-limits.conf" < "limits.conf"


def test_no_unit_takes_the_memory_of_its_host_and_the_bus_may_have_most() -> None:
    memory = {unit.name: int(unit.settings["MemoryMax"][-1].removesuffix("G")) for unit in units()}
    bus = memory.pop("pointsman-nats")

    assert set(memory.values()) == {2}
    assert bus > 2
    assert {unit.settings["TasksMax"][-1] for unit in units()} == {"512"}


def test_the_drop_in_of_a_scaler_that_starts_processes_hands_it_what_they_need_and_ends_no_engine() -> None:
    """docs/hosts.md, A scaler that starts engines: an instance outlives its scaler. By default systemd ends what a unit has started."""
    drop_in = scaler_drop_in("process.conf")
    worker = (UNITS / "pointsman-worker.service").read_text().splitlines()
    of_workers = [line for line in worker if "secret" in line or line.startswith("RestrictAddressFamilies=")]
    variables = dict(line.removeprefix("Environment=").split("=", 1) for line in drop_in if "Environment=" in line)
    names = {
        f"{ENVIRONMENT_PREFIX}{field.name.upper()}" for field in (*fields(ScalerSettings), *fields(WorkerSettings))
    }

    assert set(of_workers) < set(drop_in)
    assert {"StateDirectory=pointsman-scaler", "KillMode=process"} < set(drop_in)
    assert {variables["TMPDIR"], variables["POINTSMAN_ENGINE_DIRECTORY"]} == {"%S/pointsman-scaler"}
    assert variables.keys() - NOT_CALLED_A_SETTING - {"TMPDIR"} <= names


def test_a_scaler_that_starts_processes_has_a_seed_for_each_as_systemd_hands_over_a_directory_of_them(
    tmp_path: Path,
) -> None:
    """A worker of one engine cannot use the seed of all: it has another inbox. Of a directory systemd names a file ID_FILE."""
    drop_in = scaler_drop_in("process.conf")
    ((identifier, source),) = [
        line.removeprefix("LoadCredential=").split(":") for line in drop_in if "workers" in line and "Load" in line
    ]
    (given,) = [line.rpartition("=")[2] for line in drop_in if "POINTSMAN_WORKER_CREDENTIALS" in line]
    (of_bash,) = re.findall(r"--worker=default/scaled-\{.*\}", HOSTS)
    options = subprocess.run(
        ["bash", "-c", f"echo {of_bash}"], capture_output=True, text=True, check=True
    ).stdout.split()
    pool, names = PoolName("default"), [option.removeprefix("--worker=default/") for option in options]

    Credentials(tmp_path).make(workers=[BusUser(BusRole.WORKER, InstanceId(name), pool) for name in names])
    handed_over = {f"%d/{identifier}_{seed.name}" for seed in (tmp_path / "workers/default").iterdir()}

    assert names == [f"scaled-{number}" for number in range(1, 2 * ScalerSettings().max_instances + 1)]
    assert source == "/etc/pointsman/credentials/workers/default"
    assert handed_over == {given.replace("{instance}", name) for name in names}


def test_a_process_that_follows_engines_may_list_the_interfaces_of_its_host() -> None:
    """libzmq does when an engine ends in the middle of a replay, and aborts the process where the system refuses it."""
    allowed = {unit.name: " ".join(unit.settings["RestrictAddressFamilies"]).split() for unit in units()}

    assert {name for name, families in allowed.items() if "AF_NETLINK" in families} == {"pointsman-worker"}


def test_the_drop_in_for_engines_on_gpus_takes_back_what_keeps_them_from_starting() -> None:
    confined = units()[-1].settings
    pairs = [line.split("=", 1) for line in scaler_drop_in("process-gpu.conf")]
    lifted = {name: value for name, value in pairs if name != "Environment"}

    assert {"PrivateDevices", "MemoryDenyWriteExecute"} <= set(lifted) <= set(confined)
    assert {confined[name][-1] == value for name, value in lifted.items()} == {False}


def scaler_drop_in(name: str) -> list[str]:
    pattern = rf"```ini\n# \S+/pointsman-scaler\.service\.d/{re.escape(name)}\n\[Service\]\n(.*?)```"
    (found,) = re.findall(pattern, HOSTS, re.DOTALL)
    return str(found).splitlines()


def test_the_console_reads_its_table_and_has_only_its_own_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (unit,) = [unit for unit in units() if unit.name == "pointsman-console"]
    for name, value in unit.variables.items():
        monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    monkeypatch.setenv("POINTSMAN_CONFIG", str(UNITS / "pointsman.toml"))

    accepted = console_command.make_context("console", unit.command[2:]).params

    assert unit.command[1] == "console"
    assert (accepted["host"], accepted["port"]) == ("127.0.0.1", 8090)
    assert accepted["nats"].startswith("nats://127.0.0.1:4222,")
    assert unit.credentials == {"console.nk": "/etc/pointsman/credentials/console.nk"}


def test_of_an_ingress_only_the_first_process_gets_the_signal() -> None:
    (ingress,) = [unit for unit in OWN if unit.name == "pointsman-ingress"]

    assert ingress.settings["KillMode"] == ["mixed"]


def test_the_recorder_keeps_a_bounded_archive() -> None:
    recorder = tomllib.loads((UNITS / "pointsman.toml").read_text())["recorder"]

    assert recorder["archive_bytes_max"] >= 2 * FleetSettings().log_bytes_max


def test_systemd_finds_nothing_wrong(analyze: str, tmp_path: Path) -> None:
    root = make_root(tmp_path)
    names = [f"{unit.name}.service" for unit in units()]

    found = subprocess.run([analyze, "verify", f"--root={root}", *names], capture_output=True, text=True, check=False)

    assert (found.returncode, found.stderr) == (0, "")


def test_the_units_of_a_further_pool_are_those_of_the_first_but_for_names_and_ports(
    analyze: str, tmp_path: Path
) -> None:
    root = make_root(tmp_path)
    installed = root / "etc/systemd/system"
    (script,) = [s for s in re.findall(r"```sh\n(.*?)```", HOSTS, re.DOTALL) if "-coder.service" in s]
    script = script.replace("cd /etc/systemd/system", f"cd {installed}").replace("systemctl daemon-reload\n", "")

    subprocess.run(["sh", "-ec", script], check=True)
    made = sorted(file.name for file in installed.glob("*-coder.service"))
    found = subprocess.run([analyze, "verify", f"--root={root}", *made], capture_output=True, text=True, check=False)

    assert made == [f"pointsman-{name}-coder.service" for name in ("recorder", "scheduler", "worker")]
    assert (found.returncode, found.stderr) == (0, "")
    for name in made:
        first = (installed / name.replace("-coder", "")).read_text().splitlines()
        further = [line for line in (installed / name).read_text().splitlines() if "POINTSMAN_POOL=coder" not in line]
        changed = [(before, line) for before, line in zip(first, further, strict=True) if before != line]
        assert [before for before, _ in changed] == [line for line in first if OF_ONE_POOL.search(line)]
        assert all("coder" in line for _, line in changed)


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_a_unit_has_every_restriction_by_itself(unit: Unit) -> None:
    """systemd's exposure, of a tenth's precision, is the same without any one of them."""
    yes = {
        "DynamicUser",
        "LockPersonality",
        "NoNewPrivileges",
        "PrivateDevices",
        "PrivateTmp",
        "PrivateUsers",
        "RemoveIPC",
    }
    yes |= {f"Protect{what}" for what in ("Clock", "ControlGroups", "Home", "Hostname", "KernelLogs", "KernelModules")}
    yes |= {"MemoryDenyWriteExecute", "ProtectKernelTunables"}
    yes |= {f"Restrict{what}" for what in ("Namespaces", "Realtime", "SUIDSGID")}
    others = {"CapabilityBoundingSet": "", "ProtectSystem": "strict", "ProtectProc": "invisible", "UMask": "0077"}

    assert {name for name in yes if unit.settings.get(name) != ["yes"]} == set()
    assert {name: unit.settings.get(name, ["(none)"])[-1] for name in others} == others


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_a_unit_is_confined(unit: Unit, analyze: str, tmp_path: Path) -> None:
    root = make_root(tmp_path)
    options = ["--offline=true", f"--root={root}", f"--threshold={EXPOSURE_MAX}"]

    found = subprocess.run(
        [analyze, "security", *options, f"{unit.name}.service"], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stdout[-2000:]


def test_the_unit_of_nats_server_alone_is_in_the_group_that_reads_the_password_of_the_cluster() -> None:
    groups = {unit.name: unit.settings.get("SupplementaryGroups", []) for unit in units()}
    (group,) = groups.pop("pointsman-nats")
    made = re.findall(r"^g (\S+) -$", (UNITS / "sysusers.conf").read_text(), re.MULTILINE)

    assert made == [group]
    assert not any(groups.values())
    assert group not in {unit.name for unit in units()}, "a dynamic user cannot have a name that is taken"
    assert f"install -m 640 -g {group} credentials/nats-routes.conf /etc/pointsman/nats\n" in HOSTS


def test_the_group_is_made_by_systemd(tmp_path: Path) -> None:
    program = shutil.which("systemd-sysusers")
    if program is None:
        pytest.skip("there is no systemd here")
    (tmp_path / "etc").mkdir()

    subprocess.run([program, f"--root={tmp_path}", UNITS / "sysusers.conf"], check=True)

    assert re.findall(r"^(pointsman[^:]*):", (tmp_path / "etc/group").read_text(), re.MULTILINE) == ["pointsman-routes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file and a process to others")
def test_the_documented_steps_let_nats_server_read_its_files_and_read_them_again(
    open_path: Path, tmp_path: Path
) -> None:
    write_files_of_nats(tmp_path, open_path)
    install_files_of_nats(tmp_path, open_path)
    stranger = start_nats(open_path, groups=[])
    refused = stranger.wait(START_SECONDS_MAX)
    server = start_nats(open_path, groups=[GROUP_ID])
    try:
        started = logged(open_path, "Server is ready")
        Credentials(tmp_path / "credentials").make(operators=["alice"])
        install_files_of_nats(tmp_path, open_path)
        server.send_signal(signal.SIGHUP)
        read_again = logged(open_path, "Reloaded server configuration")
    finally:
        server.kill()
        server.wait()

    assert refused != 0
    assert started
    assert read_again
    assert (open_path / "nats-routes.conf").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file and a process to others")
def test_the_documented_steps_give_nats_server_tls_for_clients_with_a_certificate(
    open_path: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "pointsman")
    authority.issue("host")
    authority.file.rename(tmp_path / "ca.pem")
    write_files_of_nats(tmp_path, open_path)
    install_files_of_nats(tmp_path, open_path)
    install_files_of_nats(tmp_path, open_path, naming="server.key")
    with_tls(open_path / "cluster.conf")
    server = start_nats(open_path, groups=[GROUP_ID])
    try:
        started = logged(open_path, "Server is ready")
        monitor = re.findall(r'^http: "(.*)"', (open_path / "cluster.conf").read_text(), re.MULTILINE)[0]
        with urlopen(f"http://{monitor}/varz", timeout=5) as answer:
            told = json.load(answer)
    finally:
        server.kill()
        server.wait()

    assert started
    assert (told["tls_required"], told["tls_verify"]) == (True, True)
    assert (told["cluster"]["tls_required"], told["cluster"]["tls_verify"]) == (True, True)
    assert (open_path / "server.key").stat().st_mode & 0o777 == 0o640


def test_everybody_may_read_the_installed_settings_whatever_the_umask_of_who_installs_them(open_path: Path) -> None:
    (script,) = [s for s in re.findall(r"```sh\n(.*?)```", HOSTS, re.DOTALL) if "systemd/pointsman.toml" in s]
    settings = open_path / "pointsman"

    subprocess.run(["sh", "-ec", script.replace("/etc/pointsman", str(settings))], check=True, cwd=ROOT, umask=0o077)

    assert settings.stat().st_mode & 0o777 == 0o755
    assert {file.name: file.stat().st_mode & 0o777 for file in settings.iterdir()} == {
        "pointsman.toml": 0o644,
        "engines.toml": 0o644,
    }


def test_the_settings_name_no_file_that_no_step_makes() -> None:
    content = tomllib.loads((UNITS / "pointsman.toml").read_text())
    values = [value for table in (content, *content.values()) if isinstance(table, dict) for value in table.values()]

    assert not [value for value in values if isinstance(value, str) and value.startswith("/")]


def test_the_drop_in_for_tls_hands_processes_the_key_that_was_installed() -> None:
    (drop_in,) = re.findall(r"```ini\n# \S+/pointsman-\.service\.d/\S+\n\[Service\]\n(.*?)```", HOSTS, re.DOTALL)
    credential, variable = drop_in.splitlines()
    name, _, source = credential.removeprefix("LoadCredential=").partition(":")

    assert f"-g pointsman-routes host.key {source}\n" in HOSTS
    assert variable == f"Environment=POINTSMAN_NATS_KEY=%d/{name}"


def with_tls(configuration: Path) -> None:
    """The commented line, for clients and in `cluster`."""
    text = configuration.read_text().replace("/etc/pointsman/nats", str(configuration.parent))
    (tls,) = re.findall(r"^# (tls \{.*\})$", text, re.MULTILINE)
    text = text.replace(f"# {tls}", tls).replace("cluster {", f"cluster {{\n  {tls}")
    configuration.write_text(text)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everybody may enter, as /etc; tmp_path is its owner's."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        (path / "data").mkdir()
        (path / "data").chmod(0o777)
        yield path


def write_files_of_nats(source: Path, directory: Path) -> None:
    """What the steps before have made, with free ports and a store in `directory`."""
    client, cluster, monitor = free_ports(3)
    Credentials(source / "credentials").make()
    Credentials(source / "credentials").make_routes([f"127.0.0.1:{cluster}"])
    text = (ROOT / "deploy/nats/cluster.conf").read_text().replace("0.0.0.0", "127.0.0.1")
    for there, here in ((":4222", f":{client}"), (":6222", f":{cluster}"), (":8222", f":{monitor}")):
        text = text.replace(there, here)
    (source / "deploy/nats").mkdir(parents=True)
    (source / "deploy/nats/cluster.conf").write_text(text.replace("/data", f"{directory}/data"))


def install_files_of_nats(source: Path, directory: Path, *, naming: str = "nats-routes.conf") -> None:
    """By the commands of docs/hosts.md that name this file, the group given by its number."""
    scripts = re.findall(r"```sh\n(.*?)```", HOSTS, re.DOTALL)
    (script,) = (script for script in scripts if naming in script)
    script = script.replace("/etc/pointsman/nats", str(directory)).replace("pointsman-routes", str(GROUP_ID))
    subprocess.run(["sh", "-ec", script], check=True, cwd=source)


def start_nats(directory: Path, *, groups: list[int]) -> subprocess.Popen[bytes]:
    """As a user of its own, as DynamicUser= makes one."""
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [nats_server_binary(), "-c", directory / "cluster.conf"],
            env={"NATS_NAME": "nats-1"}, stdout=log, stderr=log, user=USER_ID, group=USER_ID, extra_groups=groups,
        )  # fmt: skip


def logged(directory: Path, text: str) -> bool:
    deadline = time.monotonic() + START_SECONDS_MAX
    while text not in (directory / "log").read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
