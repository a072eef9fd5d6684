"""Credentials of the bus as files: a directory of nkey seeds, one a user, and the configuration of nats-server with their
public keys and permissions. The directory is all the state there is: what is there stays, what is missing is made."""

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import nkeys

from pointsman.adapters.owner_only import OWNER_ONLY, OWNER_ONLY_DIRECTORY, write_whole
from pointsman.contracts.permissions import (
    ANY_INSTANCE,
    Account,
    BusRole,
    BusUser,
    Permissions,
    permissions_of,
    services,
)
from pointsman.contracts.subjects import valid_name
from pointsman.primitives import PoolName, WallSeconds

SEED_SUFFIX = ".nk"
WORKERS = "workers"
OPERATORS = "operators"
ROUTERS = "routers"
ADMINS = "admins"
USERS_FILE = "nats-users.conf"
ROUTES_FILE = "nats-routes.conf"
ROUTE_PASSWORD = re.compile(r'password: "([0-9a-f]{64})"')
SEED_BYTES = 32
ANSWER_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""A worker may answer a message for this long."""
PUBLIC_MODE = 0o644
NAMED = (BusRole.WORKER, BusRole.OPERATOR, BusRole.ROUTER, BusRole.ADMIN)


class Credentials:
    """`workers/<pool>/<instance>.nk`, `workers/<pool>.nk` of a worker for any instance of the pool, `operators/<name>.nk`,
    `routers/<pool>/<name>.nk`, `admins/<name>.nk`, and `<role>.nk` of every other role."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def file(self, user: BusUser) -> Path:
        match user.role:
            case BusRole.WORKER if user.name == ANY_INSTANCE:
                return self.directory / WORKERS / f"{user.pool}{SEED_SUFFIX}"
            case BusRole.WORKER:
                return self.directory / WORKERS / str(user.pool) / f"{user.name}{SEED_SUFFIX}"
            case BusRole.OPERATOR:
                return self.directory / OPERATORS / f"{user.name}{SEED_SUFFIX}"
            case BusRole.ROUTER:
                return self.directory / ROUTERS / str(user.pool) / f"{user.name}{SEED_SUFFIX}"
            case BusRole.ADMIN:
                return self.directory / ADMINS / f"{user.name}{SEED_SUFFIX}"
            case _:
                return self.directory / f"{user.role}{SEED_SUFFIX}"

    def make(
        self,
        pools: Iterable[PoolName] = (),
        *,
        workers: Iterable[BusUser] = (),
        operators: Iterable[str] = (),
        routers: Iterable[BusUser] = (),
        admins: Iterable[str] = (),
    ) -> None:
        """Make what is missing, and write USERS_FILE. Raises OSError, ValueError for a seed that is none."""
        roles = [BusUser(role) for role in BusRole if role not in NAMED]
        for pool in pools:
            self._make_directory(self.directory / WORKERS / pool)
        named = [BusUser(BusRole.OPERATOR, name) for name in operators]
        named += (BusUser(BusRole.ADMIN, name) for name in admins)
        for user in (*roles, *workers, *routers, *named):
            self._make_seed(self.file(user))
        write_whole(self.directory / USERS_FILE, self.configuration().encode(), mode=PUBLIC_MODE)

    def make_routes(self, servers: Sequence[str]) -> None:
        """Write ROUTES_FILE for the `HOST:PORT`s of a cluster, with the password that it has, else a new one. Raises
        OSError."""
        file = self.directory / ROUTES_FILE
        known = ROUTE_PASSWORD.search(file.read_text()) if file.exists() else None
        password = known[1] if known else secrets.token_hex(32)
        routes = [f"  {_text(f'nats://route:{password}@{server}')}" for server in servers]
        lines = [f"authorization {{user: route, password: {_text(password)}}}", "routes: [", *routes, "]"]
        self._make_directory(self.directory)
        write_whole(file, ("\n".join(lines) + "\n").encode())

    @property
    def pools(self) -> list[PoolName]:
        return sorted(PoolName(path.name) for path in self.directory.glob(f"{WORKERS}/*/"))

    def users(self) -> list[BusUser]:
        """Raises OSError."""
        return sorted(self._users(), key=lambda user: (user.role, user.pool or "", user.name))

    def configuration(self) -> str:
        """The accounts, for a nats-server to include. Raises OSError, ValueError for a seed that is none."""
        pools = self.pools
        users = {user: permissions_of(user, pools) for user in self.users()}
        keys = {user: _public_key(self.file(user)) for user in users}
        lines = ["# Written by pointsman. Public keys and permissions only.", "accounts {"]
        for account in Account:
            lines += _account(
                account, {user: granted for user, granted in users.items() if user.account is account}, keys
            )
        return "\n".join([*lines, "}"]) + "\n"

    def _users(self) -> Iterator[BusUser]:
        for role in BusRole:
            if role not in NAMED and self.file(BusUser(role)).exists():
                yield BusUser(role)
        for seed in self.directory.glob(f"{WORKERS}/*/*{SEED_SUFFIX}"):
            yield BusUser(BusRole.WORKER, seed.stem, PoolName(seed.parent.name))
        for seed in self.directory.glob(f"{WORKERS}/*{SEED_SUFFIX}"):
            yield BusUser(BusRole.WORKER, ANY_INSTANCE, PoolName(seed.stem))
        for seed in self.directory.glob(f"{OPERATORS}/*{SEED_SUFFIX}"):
            yield BusUser(BusRole.OPERATOR, seed.stem)
        for seed in self.directory.glob(f"{ROUTERS}/*/*{SEED_SUFFIX}"):
            yield BusUser(BusRole.ROUTER, seed.stem, PoolName(seed.parent.name))
        for seed in self.directory.glob(f"{ADMINS}/*{SEED_SUFFIX}"):
            yield BusUser(BusRole.ADMIN, seed.stem)

    def _make_directory(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY_DIRECTORY)
        while directory != self.directory.parent:
            directory.chmod(OWNER_ONLY_DIRECTORY)
            directory = directory.parent

    def _make_seed(self, file: Path) -> None:
        self._make_directory(file.parent)
        if not file.exists():
            write_whole(file, nkeys.encode_seed(os.urandom(SEED_BYTES), nkeys.PREFIX_BYTE_USER) + b"\n")
        file.chmod(OWNER_ONLY)


def valid_operator(name: str) -> bool:
    """Of an operator or admin. No role has this seed: `reader` as a file name is the reader's."""
    return valid_name(name) and name not in set(BusRole) - set(NAMED)


def _public_key(seed: Path) -> str:
    """Raises OSError, ValueError."""
    try:
        pair = nkeys.from_seed(bytearray(seed.read_text().strip().encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise ValueError(f"{seed} holds no seed: put it back, or delete it to have another one made") from error
    key = pair.public_key.decode()
    pair.wipe()
    return str(key)


def _account(account: Account, users: Mapping[BusUser, Permissions], keys: Mapping[BusUser, str]) -> list[str]:
    lines = [f"  {account} {{"]
    if account is Account.FLEET:
        lines.append("    jetstream: enabled")
    lines.append("    users = [")
    for user, granted in users.items():
        named = " ".join(part for part in (user.role, user.pool, user.name) if part)
        answers = f", allow_responses: {{max: 1, expires: {_text(f'{float(ANSWER_WALL_SECONDS):g}s')}}}"
        rights = f"publish: {_list(granted.publish)}, subscribe: {_list(granted.subscribe)}"
        rights += answers if granted.responses else ""
        lines += [f"      # {named}", f"      {{nkey: {keys[user]}, permissions: {{{rights}}}}}"]
    lines.append("    ]")
    lines.append("    exports = [")
    offered: dict[str, list[str]] = {}
    for service in services():
        if service.by is account:
            kind = ", response_type: stream" if service.streamed else ""
            offered.setdefault(f"service: {_text(service.subject)}{kind}", []).append(service.to)
    lines += [f"      {{{what}, accounts: [{', '.join(to)}]}}" for what, to in offered.items()]
    lines += ["    ]", "    imports = ["]
    for service in services():
        if service.to is account:
            renamed = f", to: {_text(service.local)}" if service.local != service.subject else ""
            lines.append(f"      {{service: {{account: {service.by}, subject: {_text(service.subject)}}}{renamed}}}")
    return [*lines, "    ]", "  }"]


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(_text(subject) for subject in subjects) + "]"


def _text(value: str) -> str:
    return json.dumps(value)  # a JSON string is a NATS configuration string
