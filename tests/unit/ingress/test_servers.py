"""How many connections an ingress takes, by the open files that it may have."""

import resource
import ssl

import pytest
from structlog.testing import capture_logs

from pointsman.runtime.health import HealthBoard
from pointsman_ingress.servers import http_server
from pointsman_ingress.settings import IngressSettings


@pytest.mark.parametrize(
    ("open_files", "secure", "connections", "told"),
    [(64, False, 1, True), (64, True, 1, True), (300, False, 22, True), (20_000, False, 9_872, False)],
)
def test_an_ingress_that_may_open_few_files_takes_few_connections_and_says_so(
    monkeypatch: pytest.MonkeyPatch, open_files: int, *, secure: bool, connections: int, told: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (open_files, open_files))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if secure else None
    with capture_logs() as logged:
        server = http_server(lambda *_: None, IngressSettings(), HealthBoard(), tls=tls)  # type: ignore[arg-type]

    assert server._limits.connections == connections
    assert [line["event"] for line in logged] == ["few_connections"] * told
