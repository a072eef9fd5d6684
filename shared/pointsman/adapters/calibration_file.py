"""Measured costs of an engine, as a JSON file: `pointsman calibrate` writes it, the worker reads it."""

from pathlib import Path

import msgspec

from pointsman.adapters.owner_only import write_whole
from pointsman.contracts.fleet import DecodeCost, PrefillCost
from pointsman.primitives import EngineSeconds, Tokens

MODE = 0o666
"""As the umask allows: others may read it."""


class CalibrationError(ValueError):
    pass


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Median time to first token over `repeats`, engine seconds, with no other request on the engine."""

    total: Tokens
    cached: Tokens
    seconds: EngineSeconds
    repeats: int = 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: median absolute error of the fit over the measurements, as a share."""

    model: str
    prefill: PrefillCost
    error: float
    measurements: list[Measurement]
    decode: DecodeCost | None = None
    engine: str = ""
    engine_version: str = ""
    measured_at: str = ""


_calibration = msgspec.json.Decoder(Calibration)


def read_calibration(path: Path) -> Calibration:
    """Raises CalibrationError."""
    try:
        return _calibration.decode(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} was not written by pointsman calibrate: {error}") from error


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Atomic; creates the directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"
    write_whole(path, content, mode=MODE)
