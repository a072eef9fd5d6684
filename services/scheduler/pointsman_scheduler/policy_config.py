"""Policies and initial State from the settings."""

import click

from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, policy_set
from pointsman.policies.setting_text import SettingTextError, settings_of
from pointsman.state.state import PoolSettings, State
from pointsman_scheduler.settings import SchedulerSettings


def chosen_policies(settings: SchedulerSettings) -> PolicySet:
    """Raises click.BadParameter."""
    try:
        return policy_set(
            routing=settings.policy,
            admission=settings.admission,
            ordering=settings.order,
            settings=settings_of(settings.set),
            prefill_window_tokens=settings.prefill_window_tokens,
            running_max=settings.running_max,
            pending_max=settings.pending_max,
            hold_seconds=settings.hold_seconds * settings.speed,
            hold_max=settings.hold_max,
            rebind=settings.rebind,
            copies=settings.copies,
        )
    except (UnknownPolicyError, SettingTextError) as error:
        raise click.BadParameter(str(error), param_hint="--set") from error


def empty_state(settings: SchedulerSettings, policies: PolicySet) -> State:
    return State(PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed), policies.trackers())
