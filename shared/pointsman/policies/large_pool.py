"""What a leader of a large pool loads before it decides."""

from pointsman.policies.pool_view import COLUMNS_FROM
from pointsman.state.latency_model import LatencyModel
from pointsman.state.state import State


def prepare_columns(state: State) -> None:
    """Loads the arrays of a large pool and brings them up to date, so that no decision has to: 0.1 s at first, and some
    milliseconds whenever instances come or go."""
    if len(state.fleet.ready) >= COLUMNS_FROM and type(state.latency) is LatencyModel:
        import pointsman.policies.routing.weighed_columns  # noqa: F401

        _ = state.columns
