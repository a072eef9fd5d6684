"""Which page a browser's request comes from. In: what browsers add to a request; other programs do not. Out: whether the
page is foreign. Who listens without a password is in reach of every page that a browser shows (DNS rebinding, forms)."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

FOREIGN_SITES = ("cross-site", "same-site")
LOCAL_NAMES = frozenset({"localhost"})


def is_of_foreign_page(*, site: str, origin: str, host: str) -> bool:
    """`site`: Sec-Fetch-Site, of a browser that shows a page over HTTPS or of this machine. Without it the origin must be
    ours, and by a host that no foreign name server answers for."""
    if site:
        return site in FOREIGN_SITES
    return bool(origin) and not (is_same_origin(origin, host) and is_host(host))


def is_same_origin(origin: str, host: str) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def is_host(host: str, *, names: Collection[str] = ()) -> bool:
    """Whether a Host header has an address, localhost or one of `names`."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in LOCAL_NAMES or name in {known.lower() for known in names}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
