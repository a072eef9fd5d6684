"""A DNS server of a test's own, on UDP: says what it is told, or fails in the ways that DNS fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
from typing_extensions import override

Kind = tuple[str, str]


@dataclass
class DnsServer(asyncio.DatagramProtocol):
    """`records`: texts by name and type. A name without any is NXDOMAIN. `code`: for every question, instead."""

    records: dict[Kind, list[str]] = field(default_factory=dict)
    ttl: int = 0
    code: dns.rcode.Rcode | None = None
    silent: bool = False
    garbage: bool = False
    asked: int = 0
    port: int = 0

    def resolver(self) -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers, made.port, made.lifetime, made.timeout = ["127.0.0.1"], self.port, 0.3, 0.15
        made.search, made.use_search_by_default = [dns.name.from_text("cluster.local")], True
        return made

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    @override
    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.asked += 1
        if self.silent:
            return
        self._transport.sendto(b"no answer" if self.garbage else self._answer(data), address)

    def _answer(self, data: bytes) -> bytes:
        query = dns.message.from_wire(data)
        (question,) = query.question
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        if self.code is not None:
            answer.set_rcode(self.code)
        elif texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(question.name, self.ttl, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer.to_wire()


@asynccontextmanager
async def running_dns() -> AsyncIterator[DnsServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        DnsServer, local_addr=("127.0.0.1", 0)
    )
    server.port = transport.get_extra_info("sockname")[1]
    try:
        yield server
    finally:
        transport.close()
