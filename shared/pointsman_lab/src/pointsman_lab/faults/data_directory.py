"""Where the fleet of a run keeps log files and archive."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class DataDirectory:
    path: Path
    keep: bool


@contextmanager
def data_directory(asked: Path | None, *, prefix: str) -> Iterator[DataDirectory]:
    """The given directory, or a temporary one that is kept after a failure."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield DataDirectory(asked.resolve(), keep=True)
        return
    kept = DataDirectory(Path(tempfile.mkdtemp(prefix=prefix)), keep=False)
    try:
        yield kept
    except Exception:
        kept.keep = True
        raise
    finally:
        if not kept.keep:
            shutil.rmtree(kept.path, ignore_errors=True)
