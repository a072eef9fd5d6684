"""What the defaults of an ingress mean where it is not alone."""

import socket

import pytest

from pointsman_ingress import main
from pointsman_ingress.settings import IngressSettings
from tests.unit.runtime.conftest import LinesOf


def test_ingresses_in_two_containers_with_one_process_id_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("a", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(IngressSettings().process_name)

    assert len(names) == 2


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        (IngressSettings(host="0.0.0.0"), ["everybody who reaches 0.0.0.0 may use the engines: see --require-keys"]),
        (IngressSettings(host="0.0.0.0", require_keys=True), []),
        (IngressSettings(host="0.0.0.0", oidc_issuer="https://issuer.example"), []),
        (IngressSettings(), []),
    ],
)
def test_an_api_that_is_open_beyond_this_machine_says_so(
    settings: IngressSettings, warnings: list[str], lines_of: LinesOf
) -> None:
    lines = lines_of(main)

    main.note_open_api(settings)

    assert [line["note"] for line in lines] == warnings
