"""Every command that reads the settings file, by its table."""

import click

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
