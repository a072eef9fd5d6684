"""Options that name policies and their settings, as usage errors of a command."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.policies.setting_text import SettingTextError


@contextmanager
def policy_usage() -> Iterator[None]:
    """Raises click.BadParameter for a policy or a setting of one that is not there, or is out of bounds."""
    try:
        yield
    except (UnknownPolicyError, SettingTextError) as error:
        raise click.BadParameter(str(error), param_hint="--set") from error
