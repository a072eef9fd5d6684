"""Settings of the recorder."""

from dataclasses import dataclass

from pointsman.runtime.settings import TEXT, DeploymentSettings, ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class RecorderSettings(DeploymentSettings, ProcessSettings):
    archive_url: str = setting(
        "sqlite+aiosqlite:///pointsman-archive.sqlite",
        "SQLAlchemy URL of the database to archive into; any async driver, for instance postgresql+asyncpg://...",
        secret=True,
        form=TEXT,
    )
    archive_days: float = setting(
        0.0,
        "Days (engine time) that the archive keeps an entry; 0: for ever. Should be longer than the log keeps it.",
    )
    archive_bytes_max: int = setting(
        0, "Bytes that entries may take in the database, the oldest go first; 0: no bound."
    )
