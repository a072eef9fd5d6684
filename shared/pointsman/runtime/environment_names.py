"""Names of `POINTSMAN_*` variables. In: an environment. Out: the settings that it gives, and the variables that no process
reads, which are misspelt or meant for another version. Values are read by `settings`."""

import os
from collections.abc import Iterable

import click
import structlog

from pointsman.runtime.engine_command import PLUGIN_PREFIX
from pointsman.runtime.settings import CONFIG, ENVIRONMENT_PREFIX, FILE_SUFFIX, OVERRIDING, ProcessSettings
from pointsman.runtime.settings_file import SECRETS, SETTINGS, meant
from pointsman.runtime.structured_logs import configure_logging

log = structlog.get_logger()

VARIABLES = {ENVIRONMENT_PREFIX + name.upper(): name for name in {*SETTINGS, CONFIG}} | {
    ENVIRONMENT_PREFIX + name.upper() + FILE_SUFFIX: name for name in SECRETS
}
"""Each variable that some process reads, with its setting."""


def start_logs(settings: ProcessSettings) -> None:
    """Logs as the settings say, and warns of variables."""
    configure_logging(settings.log_level, settings.log_format)
    warn_of_variables()


def warn_of_variables() -> None:
    """Of those that no process reads, and of those because of which a key in the process's table of the settings file counts
    for nothing."""
    if unknown := unknown_variables(os.environ):
        log.warning("unknown_variables", ignored=", ".join(unknown))
    context = click.get_current_context(silent=True)
    if context is not None and (overriding := context.meta.get(OVERRIDING)):
        log.warning("settings_overridden", file=str(context.params.get(CONFIG, "")), by=", ".join(overriding))


def given_settings(environment: Iterable[str]) -> dict[str, str]:
    """Variables that are set, with their settings."""
    return {variable: VARIABLES[variable] for variable in sorted(environment) if variable in VARIABLES}


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Each with what was probably meant. Those of the engines' plug-in are its own."""
    ours = {variable for variable in environment if variable.startswith(ENVIRONMENT_PREFIX)}
    unknown = sorted(variable for variable in ours - VARIABLES.keys() if not variable.startswith(PLUGIN_PREFIX))
    return [f"{variable} ({hint})" if (hint := _hint(variable)) else variable for variable in unknown]


def _hint(variable: str) -> str:
    """Compared without the prefix, which makes all alike."""
    known = [each.removeprefix(ENVIRONMENT_PREFIX) for each in VARIABLES]
    return meant(variable.removeprefix(ENVIRONMENT_PREFIX), known, ENVIRONMENT_PREFIX + "{}")
