"""The number given by `pointsman scale`; instances that die are replaced."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True)
class Manual(ScalingPolicy):
    name: ClassVar[str] = "manual"

    @override
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        return ScaleTarget(size.wanted, "as asked for", deliberate=True)
