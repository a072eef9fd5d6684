"""Policies and initial State from the settings."""

from typing import TYPE_CHECKING

from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.policies.setting_text import settings_of
from pointsman.primitives import engine_seconds
from pointsman.runtime.policy_options import policy_usage
from pointsman.state.state import PoolSettings, State

if TYPE_CHECKING:
    from pointsman_scheduler.settings import SchedulerSettings


def chosen_policies(settings: "SchedulerSettings") -> PolicySet:
    """Raises click.BadParameter."""
    with policy_usage():
        return policy_set(
            routing=settings.policy,
            admission=settings.admission,
            ordering=settings.order,
            settings=settings_of(settings.set),
            prefill_window_tokens=settings.prefill_window_tokens,
            running_max=settings.running_max,
            pending_max=settings.pending_max,
            hold_seconds=engine_seconds(settings.hold_seconds, settings.speed),
            hold_max=settings.hold_max,
            rebind=settings.rebind,
            copies=settings.copies,
        )


def empty_state(settings: "SchedulerSettings", policies: PolicySet) -> State:
    return State(PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed), policies.trackers())
