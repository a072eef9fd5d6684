"""What failed in the last pass of a loop that repeats. In: errors. Out: the newest one, counted each time and logged once."""

import structlog

from pointsman.primitives import PoolName
from pointsman.runtime import telemetry

log = structlog.get_logger()


class Trouble:
    def __init__(self, pool: str) -> None:
        telemetry.SCALER_ERRORS.show_zeros(pool=pool)
        self._pool = PoolName(pool)
        self._failed = self._logged = ""
        self.error = ""

    def note(self, error: str) -> None:
        telemetry.SCALER_ERRORS.labels(self._pool).inc()
        if error != self._logged:
            log.warning("scaler_error", trouble=error)
        self.error = self._failed = self._logged = error

    def end_pass(self, *, lasting: str = "") -> None:
        """What did not fail again is over. `lasting`: what failed in an earlier pass and is not over."""
        self.error, self._failed = self._failed or lasting, ""
        if not self.error:
            self._logged = ""

    def forget(self) -> None:
        self.error = self._failed = self._logged = ""
