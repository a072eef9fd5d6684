"""What `pointsman up` says of an engine's cache."""

import pytest
from msgspec.structs import replace

from pointsman.contracts.fleet import InstanceProbed
from pointsman_cli.up.cache_visibility import Verdicts
from tests.support.events import joined, reported

URL = "http://e:1"


@pytest.mark.parametrize(("certain", "sign"), [(True, "✓"), (False, "!")])
def test_an_engine_whose_past_was_being_read_when_it_joined_is_judged_by_its_report(certain: bool, sign: str) -> None:
    join, verdicts = joined("e", certain=False), Verdicts()
    probe = InstanceProbed(at=0.0, instance=join.instance, epoch=join.epoch, parity=True)

    assert verdicts.on(join, URL) is None
    assert verdicts.on(replace(reported("e", 0, []), certain=False), URL) is None
    assert verdicts.on(probe, URL) is None
    verdict = verdicts.on(replace(reported("e", 0, []), certain=certain), URL)
    assert verdict is not None
    assert verdict[0].startswith(sign)


@pytest.mark.parametrize(("parity", "sign"), [(True, "✓"), (False, "✗")])
def test_a_probe_of_certain_events_is_the_verdict(parity: bool, sign: str) -> None:
    join, verdicts = joined("e"), Verdicts()
    probe = InstanceProbed(at=0.0, instance=join.instance, epoch=join.epoch, parity=parity)

    assert verdicts.on(join, URL) is None
    verdict = verdicts.on(probe, URL)
    assert verdict is not None
    assert verdict[0].startswith(sign)
