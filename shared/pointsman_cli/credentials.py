"""`pointsman credentials`: writes the users of a nats-server for a deployment."""

import re
from pathlib import Path

import click

from pointsman.contracts.permissions import ANY_INSTANCE, BusRole, BusUser
from pointsman.contracts.subjects import valid_name
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import ROUTES_FILE, USERS_FILE, Credentials, valid_operator
from pointsman_cli.options import CONTEXT
from pointsman_cli.terminal import print_line

DEFAULT_POOL = PoolName("default")
ROUTE_PORT = 6222
SERVER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


@click.command("credentials", context_settings=CONTEXT)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("credentials"),
    show_default=True,
    help="Where seeds and the server's include file are, or will be.",
)
@click.option(
    "--pool", "pools", metavar="NAME", multiple=True, help="Pool of the deployment. Repeatable. Default: default."
)
@click.option(
    "--worker",
    "workers",
    metavar="[POOL/]INSTANCE",
    multiple=True,
    help="Instance that may join; '*' for a worker that follows many engines. Repeatable.",
)
@click.option(
    "--operator", "operators", metavar="NAME", multiple=True, help="Who may drain, scale and more. Repeatable."
)
@click.option(
    "--router",
    "routers",
    metavar="[POOL/]NAME",
    multiple=True,
    help="Other router, which may ask for a pool's cache overlap and nothing else. Repeatable.",
)
@click.option(
    "--admin",
    "admins",
    metavar="NAME",
    multiple=True,
    help="Who may do everything with the log and its buckets, by NATS's own command `nats`. Repeatable.",
)
@click.option(
    "--nats-server",
    "servers",
    metavar="HOST[:PORT]",
    multiple=True,
    help="One of the servers of a cluster; all are named. Default port: 6222.",
)
def credentials_command(
    directory: Path,
    pools: tuple[str, ...],
    workers: tuple[str, ...],
    operators: tuple[str, ...],
    routers: tuple[str, ...],
    admins: tuple[str, ...],
    servers: tuple[str, ...],
) -> None:
    """Write a NATS user for each service, worker, operator and other router of a deployment, each with the least rights
    it needs. Only an admin (--admin) has all.

    What the directory has stays as it is, so one more worker changes no other; a deleted seed ends its user. Then reload
    nats-server, whose configuration includes nats-users.conf, and give each process its own seed (--nats-credentials).
    Servers of a cluster also include nats-routes.conf, the password that they ask each other for.

    \b
      pointsman credentials --worker engine-1 --worker engine-2 --operator alice
      pointsman credentials --pool chat --pool coder --worker chat/gpu-1 --worker 'coder/*'
      pointsman credentials --nats-server nats-1 --nats-server nats-2 --nats-server nats-3
      nats-server --signal reload
    """
    credentials = Credentials(directory)
    known = sorted({*credentials.pools, *(PoolName(pool) for pool in pools)}) or [DEFAULT_POOL]
    for pool in known:
        if not valid_name(pool):
            raise click.BadParameter(f"'{pool}' is no name of a pool", param_hint="--pool")
    users = [_in_pool(text, known, BusRole.WORKER, "--worker", "INSTANCE") for text in workers]
    others = [_in_pool(text, known, BusRole.ROUTER, "--router", "NAME") for text in routers]
    for option, names in (("--operator", operators), ("--admin", admins)):
        for name in names:
            if not valid_operator(name):
                raise click.BadParameter(f"'{name}' is no name, or that of a role", param_hint=option)
    try:
        before = set(credentials.users())
        credentials.make(known, workers=users, operators=operators, routers=others, admins=admins)
        after = credentials.users()
        if servers:
            credentials.make_routes([_server(text) for text in servers])
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{directory}: {error}") from error
    for user in after:
        if user not in before:
            print_line(f"made {credentials.file(user)}")
    print_line(f"{len(after)} users in {directory / USERS_FILE}, for nats-server to include")
    if servers:
        print_line(f"{len(servers)} servers in {directory / ROUTES_FILE}, for `cluster` of nats-server to include")


def _server(text: str) -> str:
    found = SERVER.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"'{text}' is not HOST or HOST:PORT", param_hint="--nats-server")
    return text if found[2] else f"{text}:{ROUTE_PORT}"


def _in_pool(text: str, pools: list[PoolName], role: BusRole, option: str, shown: str) -> BusUser:
    pool, slash, name = text.rpartition("/")
    if not slash and len(pools) > 1:
        raise click.BadParameter(f"'{text}': there are several pools; write POOL/{shown}", param_hint=option)
    found = PoolName(pool) if slash else pools[0]
    any_instance = role is BusRole.WORKER and name == ANY_INSTANCE
    if found not in pools or not (valid_name(name) or any_instance):
        form = f"[POOL/]{shown}" + (" or [POOL/]*" if role is BusRole.WORKER else "")
        raise click.BadParameter(f"'{text}' is not {form} with a pool of {', '.join(pools)}", param_hint=option)
    return BusUser(role, name, found)
