"""Engine times of a log as Unix seconds."""

from pointsman.primitives import EngineSeconds, wall_time_of
from pointsman.state.state import State
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.terminal import UNIX_SECONDS_MAX


def wall(of: Observer | State, at: EngineSeconds) -> float:
    state = of.state if isinstance(of, Observer) else of
    return round(min(max(0.0, wall_time_of(at, state.settings.speed)), UNIX_SECONDS_MAX), 3) if at else 0.0
