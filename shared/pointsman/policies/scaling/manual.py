"""As many as people asked for with `pointsman scale`, and no other number.

What dies is replaced all the same: the number is kept, not only set.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State


@dataclass(frozen=True)
class Manual(ScalingPolicy):
    name: ClassVar[str] = "manual"

    @override
    def wish(self, state: State, size: PoolSize, now: Seconds) -> ScaleTarget:
        return ScaleTarget(size.wanted, "as asked for", deliberate=True)
