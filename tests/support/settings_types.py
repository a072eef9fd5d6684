"""Every command that reads the settings file, by its table, and what the processes need to know of each other's settings.
`python -m tests.support.settings_types` (`make settings`) writes that down."""

import json
from pathlib import Path

import click

from pointsman.runtime import settings_file
from pointsman.runtime.settings import CONFIG, SecretOption
from pointsman_cli.console.command import console_command
from pointsman_cli.up.command import up_command
from pointsman_engine_sim.main import main as engine_sim
from pointsman_ingress.main import main as ingress
from pointsman_rebalancer.main import main as rebalancer
from pointsman_recorder.main import main as recorder
from pointsman_scaler.main import main as scaler
from pointsman_scheduler.main import main as scheduler
from pointsman_worker.main import main as worker

COMMANDS: dict[str, click.Command] = {
    "console": console_command,
    "engine-sim": engine_sim,
    "ingress": ingress,
    "rebalancer": rebalancer,
    "recorder": recorder,
    "scaler": scaler,
    "scheduler": scheduler,
    "up": up_command,
    "worker": worker,
}


def settable(command: click.Command) -> set[str]:
    """Names of what a file or a variable may set."""
    return {str(parameter.name) for parameter in command.params if parameter.envvar is not None}


def process_settings() -> str:
    """What `process_settings.json` should say."""
    tables = {table: sorted(settable(command) - {CONFIG}) for table, command in COMMANDS.items()}
    secrets = {
        str(option.name)
        for command in COMMANDS.values()
        for option in command.params
        if isinstance(option, SecretOption)
    }
    return json.dumps({"tables": tables, "secrets": sorted(secrets)}, indent=1) + "\n"


if __name__ == "__main__":
    Path(settings_file.__file__).with_name("process_settings.json").write_text(process_settings())
