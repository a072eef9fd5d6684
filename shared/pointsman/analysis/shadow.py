"""The shadow of a pool: other policies that decide each of its requests too, without acting (`shadow_decisions`), and
that serve the same arrivals with a simulated fleet (`shadow_windows`). Feed it every entry of the log; it never raises
for what a log holds."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pointsman.analysis.shadow_decisions import DecisionShadows
from pointsman.analysis.shadow_figures import DecisionFigures, ShadowDecision
from pointsman.analysis.shadow_windows import WAITING_MAX, ShadowWindows, WindowResult
from pointsman.analysis.what_if import Change, Policies
from pointsman.contracts.decisions import Settings
from pointsman.policies.admission import DEFAULT_ADMISSION
from pointsman.policies.ordering import DEFAULT_ORDERING
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.setting_text import SettingTextError
from pointsman.ports import LogEntry
from pointsman.primitives import WallSeconds
from pointsman.state.state import State

SHADOWS_MAX = 4
RECORDED_WINDOWS_MAX = 24
"""Windows that may wait to be simulated while a recorded log is read, as fast as it can be."""


class ShadowChoice(msgspec.Struct, frozen=True):
    """`name` is the text that chose it."""

    name: str
    change: Change


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One other policy. `settings`: those that differ from the ones in force. Both are empty with a `problem`, which tells
    why it cannot decide. `failed`: decisions in which it raised an error, the last one in `failure`."""

    name: str
    policy: str
    settings: Settings
    problem: str
    total: DecisionFigures
    buckets: list[DecisionFigures]
    """A minute each, oldest first."""
    differences: list[ShadowDecision]
    """The last ones, oldest first."""
    failed: int
    failure: str


class ShadowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`windows`: oldest first; `waiting` more are to be simulated, `shed` ones never will, since simulating could not keep
    up, and `unusable` ones cannot, as `window_problem` tells of the last. `sampled_out`: placements not decided again, since
    there were too many."""

    shadows: list[ShadowReport]
    windows: list[WindowResult]
    sampled_out: int
    simulated: int
    waiting: int
    shed: int
    unusable: int
    window_problem: str


class Shadow:
    def __init__(
        self,
        choices: Sequence[ShadowChoice],
        state: State,
        running: PolicySet | None = None,
        *,
        window_seconds: WallSeconds | None = None,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`state` is the caller's, in log order, who applies each entry before `apply`; `running`: the policies in force, if
        known. `window_seconds`: a fixed length of windows; `waiting_max`: of those that wait to be simulated."""
        self._names = [choice.name for choice in choices]
        changes = {choice.name: choice.change for choice in choices}
        self._decisions = DecisionShadows([choice.change for choice in choices], state, running)
        self._windows = ShadowWindows(changes, state, running, seconds=window_seconds, waiting_max=waiting_max)

    def begin_again(self, state: State) -> None:
        """The log goes on from another state, after entries that are lost. Figures are kept."""
        self._decisions.begin_again(state, None)
        self._windows.begin_again(state, None)

    def apply(self, entry: LogEntry) -> None:
        self._decisions.apply(entry)
        self._windows.take(entry)

    def finish(self) -> None:
        """The log has ended: decides what was held back for entries that may have come."""
        self._decisions.finish()
        self._windows.finish()

    def work(self) -> bool:
        """One slice of the simulations, of some milliseconds; may run in another thread than `apply`. Returns whether there
        was anything to do."""
        return self._windows.work()

    def summary(self) -> ShadowSummary:
        windows = self._windows
        return ShadowSummary(
            shadows=[
                ShadowReport(
                    name=name,
                    policy=shadow.context.policies.routing.name if shadow.context else "",
                    settings=shadow.settings if shadow.context else {},
                    problem=shadow.problem,
                    total=msgspec.structs.replace(shadow.total),
                    buckets=list(shadow.buckets),
                    differences=list(shadow.differences),
                    failed=shadow.failed,
                    failure=shadow.failure,
                )
                for name, shadow in zip(self._names, self._decisions.shadows, strict=True)
            ],
            windows=list(windows.results),
            sampled_out=self._decisions.sampled_out,
            simulated=windows.simulated,
            waiting=windows.waiting,
            shed=windows.shed,
            unusable=windows.unusable,
            window_problem=windows.problem,
        )


def shadow_choice(text: str) -> ShadowChoice:
    """POLICY[:KEY=VALUE,...]: settings of that routing policy, `admission=NAME`, `order=NAME`, and settings of those as
    `admission.KEY=VALUE` and `order.KEY=VALUE`. Raises UnknownPolicyError, SettingTextError."""
    policy, _, rest = text.partition(":")
    settings: dict[str, list[str]] = {"routing": [], "admission": [], "order": []}
    named = {"routing": policy}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise SettingTextError(f"'{part}' in '{text}' is not KEY=VALUE")
        kind = key.partition(".")[0]
        if key in settings:
            named[key] = value
        elif kind in settings:
            settings[kind].append(part)
        else:
            settings["routing"].append(f"routing.{part}")
    change = Change(
        policy=named["routing"],
        admission=named.get("admission"),
        ordering=named.get("order"),
        texts=[text for texts in settings.values() for text in texts],
    )
    # Settings of a policy that is not named are those of the one in force, which is not known yet.
    known = [text for kind, texts in settings.items() if kind in named for text in texts]
    replace(change, texts=known).of_policies(Policies(named["routing"], DEFAULT_ADMISSION, DEFAULT_ORDERING, {}))
    return ShadowChoice(text, change)
