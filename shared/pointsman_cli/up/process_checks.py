"""Checks what the planned processes would read, before any of them starts: flags, `POINTSMAN_*` and the settings file. Each
process checks the same when it starts."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

import click

from pointsman.policies.setting_text import parts_of
from pointsman.runtime.environment_names import given_settings
from pointsman.runtime.settings import CONFIG, ENVIRONMENT_PREFIX, SettingsType, command
from pointsman.runtime.settings_file import FileSettings, read_settings_file
from pointsman_cli.up.addresses import refuse
from pointsman_cli.up.plan import FleetPlan, ProcessPlan
from pointsman_cli.up.scripts import MissingScriptError, settings_type_of
from pointsman_cli.up.settings import UpSettings, words

CONSOLE = "console"
OWN = frozenset(one.name for one in fields(UpSettings))
OF_EACH_PROCESS = ("host", "port")
"""Names that `up` has too, for its ingresses."""
OTHERWISE_NAMED = {
    "console_port": "console_port",
    "min_instances": "instances",
    "max_instances": "instances",
    "pools": "also",
    "pool_tokenizer": "also",
}
OPEN_TO_SET = frozenset({"scaling", "hold_seconds"})
"""`up` only has another default for them if it scales."""


def check_processes(plan: FleetPlan, planned: Iterable[ProcessPlan]) -> list[str]:
    """Returns variables that are set and reach no process, since `up` decides their settings; each with what to set instead.
    Raises click.UsageError, and click.ClickException if Pointsman is not installed whole."""
    followed = {CONFIG} | OWN
    for process in _different(planned):
        table = CONSOLE if process.role == CONSOLE else process.script.removeprefix("pointsman-")
        with _variables(process.environment_in(os.environ)):
            try:
                known = _checked(process, table)
            except click.ClickException as error:
                raise click.UsageError(f"{process.name}: {error.format_message()}") from error
            except MissingScriptError as error:
                raise click.ClickException(str(error)) from error
        _check_set(plan, process, table)
        if plan.config is not None:
            _check_decided(plan, process, table, read_settings_file(plan.config, table, known))
        arriving = given_settings(process.environment_in(os.environ)).values()
        followed |= known.intersection(arriving) - _decided(plan, process)
    ignored = [(variable, name) for variable, name in given_settings(os.environ).items() if name not in followed]
    return [
        f"{variable} (set {ENVIRONMENT_PREFIX}{alike.upper()})" if (alike := _own_alike(name)) else variable
        for variable, name in ignored
    ]


def _different(planned: Iterable[ProcessPlan]) -> list[ProcessPlan]:
    """One of each kind in each pool: those of a kind differ in names and addresses only."""
    pool = ENVIRONMENT_PREFIX + "POOL"
    kinds: dict[tuple[str, str | None], ProcessPlan] = {}
    for process in planned:
        if not process.foreign:
            kinds.setdefault((process.role, process.environment.get(pool)), process)
    return list(kinds.values())


def _checked(process: ProcessPlan, table: str) -> set[str]:
    """Names of its settings. Raises click.ClickException."""
    if process.role == CONSOLE:
        from pointsman_cli.console.command import console_command  # large

        console_command.make_context(CONSOLE, list(process.arguments[1:]))
        return {str(option.name) for option in console_command.params}
    settings_type: type[SettingsType] = settings_type_of(process.script)

    @command(settings_type, name=process.script, table=table)
    def read(settings: SettingsType) -> None:
        """Does nothing with them."""

    read.main(list(process.arguments), standalone_mode=False)
    return {str(option.name) for option in read.params}


def _check_set(plan: FleetPlan, process: ProcessPlan, table: str) -> None:
    """A process that followed it would be where nobody looks for it, or disagree with the others."""
    decided = _decided(plan, process) - OPEN_TO_SET
    for service, flag, _ in map(parts_of, plan.settings.set):
        if service == table and (name := flag.replace("-", "_")) in decided:
            alike = _own_alike(name, table)
            instead = f"use --{alike.replace('_', '-')}" if alike else "leave it out"
            refuse("--set", f"pointsman up decides {service}.{name} itself; {instead}")


def _check_decided(plan: FleetPlan, process: ProcessPlan, table: str, file: FileSettings) -> None:
    """A setting of the file that `up` overrides would be ignored without a word."""
    decided = _decided(plan, process)
    for name in sorted(decided & file.table.keys()):
        _refuse(plan, f"[{table}] {name}", _own_alike(name, table))
    for name in sorted((decided & file.top.keys()) - OWN):
        _refuse(plan, name, _own_alike(name))


def _refuse(plan: FleetPlan, key: str, alike: str) -> None:
    instead = f"set {alike} in [up]" if alike else "leave it out"
    raise click.UsageError(f"{plan.config}: pointsman up decides {key} itself; {instead}")


def _own_alike(name: str, table: str = "ingress") -> str:
    """The setting of `up` that decides this one (slo_ttft for slo_ttft_seconds), or ""."""
    if other := OTHERWISE_NAMED.get(name) or OTHERWISE_NAMED.get(f"{table}_{name}"):
        return other
    if name in OF_EACH_PROCESS and table != "ingress":
        return ""
    return max((own for own in OWN if f"{name}_".startswith(f"{own}_")), key=len, default="")


def _decided(plan: FleetPlan, process: ProcessPlan) -> set[str]:
    """Settings that `up` gives to a process, as variables or, to an engine, as flags."""
    names = {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in process.environment}
    if process.role == "engine":
        names |= _flags(process.arguments) - _flags(words("--engine-args", plan.settings.engine_args))
    return names


def _flags(arguments: Iterable[str]) -> set[str]:
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
