"""Engines that a provider started and that ended though nobody stopped them. In: such ends. Out: a log line for each, and
a ProviderError, which the scaler shows as its trouble. It does not change when the next engine is started."""

from collections.abc import Sequence

import structlog

from pointsman.adapters.backoff import RUNS_WELL_SECONDS
from pointsman.contracts.codec import short_reason
from pointsman.ports import ProviderError
from pointsman.primitives import Seconds

log = structlog.get_logger()


class UnaskedEnds:
    def __init__(self) -> None:
        self._untold = ""
        self._failed_starts = 0
        """In a row: of engines that did not run for RUNS_WELL_SECONDS."""

    def note(self, instance: str, why: str, *, ran_seconds: Seconds, lines: Sequence[str] = ()) -> None:
        """`lines`: the end of its log, if that goes with it."""
        self._failed_starts = 0 if ran_seconds >= RUNS_WELL_SECONDS else self._failed_starts + 1
        log.warning("instance_ended", instance=instance, why=why, ran_seconds=round(ran_seconds, 1), log=list(lines))
        starts = f", start number {self._failed_starts} that did not last" if self._failed_starts > 1 else ""
        self._untold = short_reason(f"{instance} ended by itself after {ran_seconds:.0f} s{starts}: {why}")

    def tell(self) -> None:
        """Raises ProviderError for the newest end that was not told yet."""
        untold, self._untold = self._untold, ""
        if untold:
            raise ProviderError(untold)
