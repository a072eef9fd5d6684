"""Finds running fleets: `DATA/fleet.json` lists the processes, `DATA/fleet.lock` is locked while `up` runs, and
`$XDG_STATE_HOME/pointsman/fleets` points to the data directories. No file contains the secret."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import click
import msgspec

from pointsman.adapters.file_lock import is_locked, try_lock
from pointsman.adapters.owner_only import OWNER_ONLY, is_open_to_others, make_owner_only, write_whole
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import LOCAL_ACTOR
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.settings import NATS_SCHEMES, FleetSettings, nats_shown, options
from pointsman_cli.options import as_given
from pointsman_cli.terminal import SeveralLinesError

FLEET_FILE = "fleet.json"
LOCK_FILE = "fleet.lock"
LOCK_ATTEMPTS_MAX = 5
LOCK_RETRY_SECONDS = 0.05


class NoFleetError(click.ClickException):
    """No running fleet was found."""


class SeveralFleetsError(SeveralLinesError):
    """Several fleets run and none was named."""


class FleetInUseError(click.ClickException):
    """Another running fleet uses this data directory."""


class UnusableDataError(click.ClickException):
    """The data directory cannot be created or written to."""


class FleetProcess(msgspec.Struct, frozen=True):
    name: str
    role: str
    pid: int
    url: str
    admin_url: str = ""
    """An ingress's probes and metrics."""

    @property
    def probes(self) -> str:
        return self.admin_url or self.url


class FleetFile(msgspec.Struct, frozen=True, kw_only=True):
    """`pid` and `started_at` (Unix seconds) are those of `up`. `credentials`: directory of the users of nats-server;
    `tls`: files of its certificates, by setting. `further`: models of the other pools, by pool."""

    nats: str
    ingress: str
    pool: str
    model: str
    policy: str
    speed: float
    slo_ttft: float
    block_tokens: int
    secret_file: str
    credentials: str = ""
    tls: dict[str, str] = {}
    data: str
    pid: int
    started_at: float
    processes: list[FleetProcess] = []
    further: dict[str, str] = {}
    further_block_tokens: dict[str, int] = {}

    def settings(self, pool: str | None = None, *, acts: bool = False) -> FleetSettings:
        """`acts`: as an operator, not only a reader. Raises OSError if the secret is unreadable,
        BadParameter."""
        pool = pool or self.pool
        if self.credentials and pool not in (self.pool, *self.further):  # they open no other
            message = f"no pool {pool}; this fleet has: {', '.join((self.pool, *self.further))}"
            raise click.BadParameter(message, param_hint="--pool")
        user = BusUser(BusRole.OPERATOR, LOCAL_ACTOR) if acts else BusUser(BusRole.READER)
        return FleetSettings(
            nats=self.nats,
            nats_credentials=str(Credentials(Path(self.credentials)).file(user)) if self.credentials else "",
            nats_ca=self.tls.get("nats_ca", ""),
            nats_certificate=self.tls.get("nats_certificate", ""),
            nats_key=self.tls.get("nats_key", ""),
            pool=pool,
            speed=self.speed,
            block_tokens=self.further_block_tokens.get(pool, self.block_tokens),
            secret=Path(self.secret_file).read_text().strip(),
        )

    def of_role(self, role: str) -> list[FleetProcess]:
        return [process for process in self.processes if process.role == role]


def find_fleet(nats: str | None = None, data: Path | None = None) -> FleetFile:
    """Raises NoFleetError, SeveralFleetsError."""
    if data is not None:
        return _fleet_of(data)
    running = running_fleets()
    if nats is not None:
        running = [fleet for fleet in running if fleet.nats == nats]
    if not running:
        if nats is None and (starting := _held_directories()):
            raise _still_starting(starting[0])
        where = f"on {nats_shown(nats)}" if nats else "on this machine"
        other = "" if nats or not os.environ.get("POINTSMAN_NATS") else '; or name yours: --from "$POINTSMAN_NATS"'
        raise NoFleetError(f"no fleet that was started here runs {where}; start one with: pointsman up{other}")
    if len(running) > 1:
        listed = "\n".join(
            f"  --from {fleet.data}   (started by pid {fleet.pid}, {fleet.ingress})" for fleet in running
        )
        raise SeveralFleetsError(f"several fleets run; choose one:\n{listed}")
    return running[0]


def fleet_at(place: str | None = None) -> FleetFile:
    """The fleet that `--from` names; without a name the only one. Raises NoFleetError, SeveralFleetsError."""
    return find_fleet(*_named(place))


def fleet_settings(place: str | Path | None = None, pool: str | None = None, *, acts: bool = False) -> FleetSettings:
    """Settings to join the fleet that `--from` names; `POINTSMAN_*` for a NATS URL of a fleet not started here. `acts`: see
    `FleetFile.settings`. Raises NoFleetError, SeveralFleetsError."""
    nats, data = _named(place)
    try:
        return find_fleet(nats, data).settings(pool, acts=acts)
    except NoFleetError:
        if nats is None:
            raise
        command = click.Command("settings", params=list(options(FleetSettings)))
        found = FleetSettings(**command.make_context("settings", ["--nats", nats]).params)
    return found if pool is None else replace(found, pool=pool)


def fleet_as_given() -> str:
    """As `as_given`, for advised commands of a running fleet: nothing if a recorded log was given."""
    context = click.get_current_context(silent=True)
    place = context.params.get("place") if context else None
    return "" if place and _is_recorded(place) else as_given()


def running_fleets() -> list[FleetFile]:
    return [fleet for data in _held_directories() if (fleet := read_fleet_file(data)) is not None]


def _held_directories() -> list[Path]:
    """Data directories of fleets that run or start."""
    held = []
    for pointer in sorted(_pointers().glob("*.path")):
        with suppress(OSError, ValueError):  # another user's, or damaged
            data = Path(pointer.read_text().strip())
            if is_running(data):
                held.append(data)
            else:
                pointer.unlink(missing_ok=True)
    return held


def read_fleet_file(data: Path) -> FleetFile | None:
    try:
        return msgspec.json.decode((data / FLEET_FILE).read_bytes(), type=FleetFile)
    except (OSError, msgspec.DecodeError):
        return None


def is_running(data: Path) -> bool:
    return is_locked(data / LOCK_FILE)


@contextmanager
def data_dir_held(data: Path) -> Iterator[None]:
    """Lock the data directory and point to it, so that other commands find a fleet that is starting; `announce` writes the fleet
    file. Both are removed at the end. Raises FleetInUseError, UnusableDataError."""
    with _lock_file(data) as lock:
        if not _locked(lock):
            fleet = read_fleet_file(data)
            by = f"the fleet that pid {fleet.pid} runs ({fleet.ingress})" if fleet else "another pointsman up"
            raise FleetInUseError(
                f"the data directory {data} is in use by {by}; stop that one, or give this one its own with --data DIR"
            )
        (data / FLEET_FILE).unlink(missing_ok=True)  # of a fleet that was killed
        with suppress(OSError):  # `announce` raises it
            _point_to(data)
        try:
            yield
        finally:
            (data / FLEET_FILE).unlink(missing_ok=True)
            _pointer_to(data).unlink(missing_ok=True)


def announce(fleet: FleetFile) -> None:
    """Write the fleet file and its pointer, each atomically. Raises OSError."""
    data = Path(fleet.data)
    write_whole(data / FLEET_FILE, msgspec.json.format(msgspec.json.encode(fleet), indent=2) + b"\n")
    _point_to(data)


def _point_to(data: Path) -> None:
    _pointers().mkdir(parents=True, exist_ok=True)
    write_whole(_pointer_to(data), f"{data.resolve()}\n".encode())


def _lock_file(data: Path) -> IO[bytes]:
    """What the owner alone may read and lock. An earlier version left it and all beside it open to others; what lies beside
    ours may be other people's."""
    try:
        str(data.absolute()).encode()  # as the pointer to it and the children's settings need it
        lock = data / LOCK_FILE
        if not data.exists() or (lock.exists() and is_open_to_others(lock)):
            make_owner_only(data)
        return os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY), "ab")
    except (OSError, UnicodeEncodeError) as error:
        reason = "its name is not UTF-8" if isinstance(error, UnicodeEncodeError) else error.strerror or error
        raise UnusableDataError(
            f"{data} cannot be the data directory: {reason}; name another with --data DIR"
        ) from error


def _locked(lock: IO[bytes]) -> bool:
    for _ in range(LOCK_ATTEMPTS_MAX):
        if try_lock(lock):
            return True
        time.sleep(LOCK_RETRY_SECONDS)
    return False


def _fleet_of(data: Path) -> FleetFile:
    try:
        running = is_running(data)
    except PermissionError as error:
        owner = "another user"
        with suppress(OSError, KeyError):
            owner = data.owner()
        raise NoFleetError(f"{data} belongs to {owner}: only they can use its fleet from here") from error
    if not running:
        raise NoFleetError(f"no fleet runs with the data directory {data}; start it with: pointsman up --data {data}")
    fleet = read_fleet_file(data)
    if fleet is None:
        raise _still_starting(data)
    return fleet


def _still_starting(data: Path) -> NoFleetError:
    return NoFleetError(f"the fleet of {data} is still starting; try again in a moment")


def _named(place: str | Path | None) -> tuple[str | None, Path | None]:
    if place is None:
        return None, None
    if not str(place).strip():
        raise click.BadParameter("is empty; name a data directory or a NATS URL", param_hint="--from")
    if _is_recorded(place):
        message = (
            f"{place} is a recorded log, and this command asks a running fleet; "
            "recorded logs are read by: state, explain, doctor, hit-rate, usage, what-if, replay, export"
        )
        raise click.BadParameter(message, param_hint="--from")
    return (str(place), None) if _scheme_of(place) is not None else (None, Path(place))


def _scheme_of(place: str | Path) -> str | None:
    scheme, is_url, _ = str(place).partition("://") if isinstance(place, str) else ("", "", "")
    return scheme if is_url else None


def _is_recorded(place: str | Path) -> bool:
    scheme = _scheme_of(place)
    return place == "-" or (scheme not in NATS_SCHEMES if scheme is not None else Path(place).is_file())


def _pointers() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pointsman" / "fleets"


def _pointer_to(data: Path) -> Path:
    return _pointers() / f"{hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:16]}.path"
