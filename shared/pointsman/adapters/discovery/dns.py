"""Engines from DNS, asked again when an answer's time to live is over, and every 5 s at least.

- `dns:HOST:PORT`: one target per address of A records, or of AAAA where there is no A record.
- `srv:NAME`: one target per host and port of SRV records.

DNS cannot tell a broken server from an empty service. A failed lookup changes nothing. An answer without records counts
as a failure until it has been repeated for EMPTY_WALL_SECONDS. DNS knows no identity: whether an engine was replaced at
its address is seen in its events."""

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator
from ipaddress import ip_address
from typing import Any, ClassVar

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
import structlog
from typing_extensions import override

from pointsman.adapters.discovery.targets import TargetError, engine_targets, engine_url, listing
from pointsman.bounds import PORT_MAX
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import WallSeconds

log = structlog.get_logger()

POLL_WALL_SECONDS_MIN: WallSeconds = WallSeconds(1.0)
POLL_WALL_SECONDS_MAX: WallSeconds = WallSeconds(5.0)
"""Below most times to live (Docker's is 600 s): an engine that is added should not wait."""
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
LOOKUP_WALL_SECONDS_MAX: WallSeconds = WallSeconds(5.0)
EMPTY_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*)(\.[A-Za-z0-9_-]+)*\.?")
_ABSENT = (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer)


class DnsDiscovery(EngineDiscovery):
    scheme: ClassVar[str]

    def __init__(
        self,
        text: str,
        *,
        resolver: dns.asyncresolver.Resolver | None = None,
        poll_seconds_min: WallSeconds = POLL_WALL_SECONDS_MIN,
        empty_seconds: WallSeconds = EMPTY_WALL_SECONDS,
    ) -> None:
        """`resolver` None: as /etc/resolv.conf says at each lookup."""
        self._text = text
        self._resolver = resolver
        self._poll_seconds_min = float(poll_seconds_min)
        self._empty_seconds = float(empty_seconds)
        self._empty_since: float | None = None
        self.name = f"{self.scheme}:{text}"
        self.problem = ""

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        last: list[EngineTarget] | None = None
        while True:
            found, seconds = await self._ask()
            if found is not None and found != last:
                last = found
                yield found
            await asyncio.sleep(max(seconds, self._poll_seconds_min))

    @abstractmethod
    async def _found(self) -> tuple[list[EngineTarget], float]:
        """Targets and seconds that they hold. Raises DNSException, OSError."""

    async def _ask(self) -> tuple[list[EngineTarget] | None, float]:
        """None: the last list stays."""
        retry = float(RETRY_WALL_SECONDS)
        try:
            async with asyncio.timeout(float(LOOKUP_WALL_SECONDS_MAX)):
                found, seconds = await self._found()
        except _ABSENT as error:
            found, seconds, reason = [], retry, str(error)
        except (dns.exception.DNSException, OSError, TimeoutError, ValueError) as error:
            self._fail(str(error) or type(error).__name__)
            return None, retry
        else:
            reason = "the answer has no usable record"
        if not found and not self._believes_empty():
            self._fail(f"{reason}; the known engines stay until this was said for {self._empty_seconds:g} s")
            return None, retry
        listed, excess = listing({target.instance: target for target in found})
        if found:
            self._empty_since = None
        self._fail(excess if found else reason)
        return listed, min(seconds, float(POLL_WALL_SECONDS_MAX))

    def _believes_empty(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._empty_since is None:
            self._empty_since = now
        return now - self._empty_since >= self._empty_seconds

    async def _resolve(self, name: str, kind: dns.rdatatype.RdataType) -> tuple[list[Any], float]:
        """Records and their time to live. Raises DNSException, OSError."""
        resolver = self._resolver or dns.asyncresolver.Resolver()
        answer = await resolver.resolve(name, kind, search=True)
        return list(answer), float(answer.rrset.ttl) if answer.rrset is not None else 0.0

    def _fail(self, reason: str) -> None:
        """Empty: it does not."""
        if reason and not self.problem:
            log.warning("engines_lookup_failed", source=self.name, reason=reason)
        self.problem = f"{self.name}: {reason}" if reason else ""


class AddressDiscovery(DnsDiscovery):
    scheme = "dns"

    def __init__(self, text: str, **options: Any) -> None:
        """`text`: HOST:PORT. Raises ValueError."""
        super().__init__(text, **options)
        host, _, port = text.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port) if port.isdecimal() and len(port) <= 5 else 0
        self._is_address = _is_address(self._host)
        if not 1 <= self._port <= PORT_MAX or not (self._is_address or _NAME.fullmatch(self._host)):
            raise ValueError(f"dns:{text} is not dns:HOST:PORT")

    @override
    async def _found(self) -> tuple[list[EngineTarget], float]:
        if self._is_address:
            return self._targets([self._host]), float(POLL_WALL_SECONDS_MAX)
        try:
            records, seconds = await self._resolve(self._host, dns.rdatatype.A)
        except dns.resolver.NoAnswer:
            records, seconds = await self._resolve(self._host, dns.rdatatype.AAAA)
        return self._targets([record.address for record in records]), seconds

    def _targets(self, addresses: list[str]) -> list[EngineTarget]:
        return [target for address in addresses for target in engine_targets(url=engine_url(address, self._port))]


class ServiceDiscovery(DnsDiscovery):
    scheme = "srv"

    def __init__(self, text: str, **options: Any) -> None:
        """`text`: name of the SRV records. Raises ValueError."""
        super().__init__(text, **options)
        if not _NAME.fullmatch(text):
            raise ValueError(f"srv:{text} is not srv:NAME, such as srv:_http._tcp.vllm.default.svc.cluster.local")

    @override
    async def _found(self) -> tuple[list[EngineTarget], float]:
        records, seconds = await self._resolve(self._text, dns.rdatatype.SRV)
        return [target for record in records for target in self._targets(record)], seconds

    def _targets(self, record: Any) -> list[EngineTarget]:
        """None of a record that names no service (`.`) or no possible host."""
        host = record.target.to_text(omit_final_dot=True)
        try:
            return engine_targets(url=engine_url(host, record.port)) if host and record.port else []
        except TargetError as error:
            log.warning("engine_not_followed", source=self.name, reason=str(error))
            return []


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
