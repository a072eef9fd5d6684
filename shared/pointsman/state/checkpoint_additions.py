"""Attributes that State got since checkpoints outlive a release, and how an older checkpoint of the same fold version gets
them: from the rest of the state, once that is restored. What an older State does not determine needs a new FOLD_VERSION."""

from collections.abc import Callable
from typing import Any

from pointsman.state.state import State

ADDITIONS: dict[str, Callable[[State, Any], Any]] = {}
"""By `Class.attribute`: its value for that object of the restored state."""
