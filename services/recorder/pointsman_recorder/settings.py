"""Settings of the recorder."""

from dataclasses import dataclass

from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class RecorderSettings(FleetSettings, ProcessSettings):
    archive_url: str = setting(
        "sqlite+aiosqlite:///pointsman-archive.sqlite",
        "SQLAlchemy URL of the database to archive into; any async driver, for instance postgresql+asyncpg://...",
        secret=True,
    )
