"""Settings of the scheduler, and the policies and empty State that they choose."""

from dataclasses import dataclass

import click
from typing_extensions import override

from pointsman.bounds import COUNT, POSITIVE, Bounds
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION
from pointsman.policies.dispatch.recording import RIVALS
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.policies.queue_limits import HOLD_MAX, PENDING_MAX, PREFILL_WINDOW_TOKENS, RUNNING_MAX
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.setting_text import settings_of
from pointsman.primitives import WallSeconds, engine_seconds
from pointsman.runtime.engine_urls import EngineUrlSettings
from pointsman.runtime.policy_options import policy_usage
from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting
from pointsman.state.state import PoolSettings, State


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(FleetSettings, EngineUrlSettings, ProcessSettings):
    policy: str = setting(DEFAULT_ROUTING, "Routing policy.", choices=tuple(sorted(ROUTING_POLICIES)))
    set: tuple[str, ...] = setting(
        (),
        "Setting of a policy as KIND.NAME=VALUE, KIND being routing, admission, order, pair or outlier. Repeatable. "
        "docs/policies.md names them.",
    )
    admission: str = setting(DEFAULT_ADMISSION, "Admission policy.", choices=tuple(sorted(ADMISSION_POLICIES)))
    order: str = setting(
        DEFAULT_ORDERING, "Order in which waiting requests are granted.", choices=tuple(sorted(ORDERING_POLICIES))
    )
    prefill_window_tokens: int = setting(
        PREFILL_WINDOW_TOKENS,
        "Uncached prompt tokens that may be inside one engine before their first token.",
        bounds=COUNT,
    )
    running_max: int = setting(
        RUNNING_MAX, "Requests that may be inside one engine (its --max-num-seqs).", bounds=COUNT
    )
    pending_max: int = setting(
        PENDING_MAX, "Requests that may wait in the whole pool; more are refused with 429.", bounds=COUNT
    )
    suspect_seconds: WallSeconds = setting(
        3.0,
        "Wall seconds of silence after which a worker, which reports every second, is suspected.",
        bounds=Bounds(least=2.0),
    )
    leave_seconds: WallSeconds = setting(
        30.0,
        "Wall seconds of silence after which an instance counts as gone; at least --suspect-seconds.",
        bounds=POSITIVE,
    )
    lease_seconds: WallSeconds = setting(
        1.0,
        "Wall seconds without a renewal after which another scheduler of the pool leads; the same for all of them.",
        bounds=POSITIVE,
    )
    checkpoint_seconds: WallSeconds = setting(
        60.0, "Wall seconds between checkpoints; 0 takes none, and each start folds the whole log."
    )
    hold_seconds: WallSeconds = setting(
        30.0,
        "Wall seconds for which arrivals wait while no instance is ready, whatever the reason; 0 answers 503 at once.",
    )
    hold_max: int = setting(HOLD_MAX, "Requests that may wait while no instance is ready.")
    rebind: bool = setting(
        False,
        "Let a rebalancer with --rebind take overdue requests out of an engine before their first token, to start "
        "again elsewhere. The prefill done for them is lost, and counted.",
    )
    copies: bool = setting(
        True,
        "Copy hot prefixes to further engines ahead of need, in a pool whose engines fetch prefixes from each other.",
    )
    rivals: int = setting(
        RIVALS,
        "Candidates that a decision records in the log beside the chosen one: those that came nearest. The others are "
        "counted; whoever replays the log computes them again.",
    )
    request_seconds_max: WallSeconds = setting(
        900.0,
        "Wall seconds after which a granted request without an end is given up; longer than the --request-timeout-seconds of "
        "all ingresses.",
        bounds=POSITIVE,
    )
    waiter_seconds: WallSeconds = WallSeconds(3.0)
    """No option. Wall seconds after which a request is given up that its ingress, which names it every second, does not name."""

    @override
    def check(self) -> None:
        if self.leave_seconds < self.suspect_seconds:
            message = f"must be at least --suspect-seconds ({self.suspect_seconds:g}), not {self.leave_seconds:g}"
            raise click.BadParameter(message, param_hint="--leave-seconds")
        self.policies()

    def policies(self) -> PolicySet:
        """Raises click.BadParameter."""
        with policy_usage():
            return policy_set(
                routing=self.policy,
                admission=self.admission,
                ordering=self.order,
                settings=settings_of(self.set),
                prefill_window_tokens=self.prefill_window_tokens,
                running_max=self.running_max,
                pending_max=self.pending_max,
                hold_seconds=engine_seconds(self.hold_seconds, self.speed),
                hold_max=self.hold_max,
                rebind=self.rebind,
                copies=self.copies,
            )

    def empty_state(self, policies: PolicySet) -> State:
        return State(PoolSettings(block_tokens=self.block_tokens, speed=self.speed), policies.trackers())
