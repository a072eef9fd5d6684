"""What an engine was measured to cost, in a file: `pointsman calibrate` writes it, the engine's worker reads it.

Readable JSON, with the measurements, so that a fit can be checked later.
"""

from pathlib import Path

import msgspec

from pointsman.contracts.fleet import DecodeCost, PrefillCost
from pointsman.primitives import Seconds, Tokens


class CalibrationError(ValueError):
    """No calibration can be read there; the message says where and why."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How long the first token of a prompt took, alone on the engine, engine seconds: the median of `repeats`."""

    total: Tokens
    cached: Tokens
    seconds: Seconds
    repeats: int = 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, measured. `error`: median absolute error of the fit over the measurements, as a share."""

    model: str
    prefill: PrefillCost
    error: float
    measurements: list[Measurement]
    decode: DecodeCost | None = None
    engine: str = ""
    engine_version: str = ""
    measured_at: str = ""
    """UTC, ISO 8601."""


_calibration = msgspec.json.Decoder(Calibration)


def read_calibration(path: Path) -> Calibration:
    """Raises CalibrationError."""
    try:
        return _calibration.decode(path.read_bytes())
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise CalibrationError(msg) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{path} was not written by pointsman calibrate: {error}"
        raise CalibrationError(msg) from error


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Whole or not at all, with its directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    unfinished.replace(path)
