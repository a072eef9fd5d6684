"""The timeline of a request as the console's processes hand it over and its API shows it."""

from pathlib import Path

import msgspec

from pointsman.contracts.requests import RequestArrived
from pointsman.policies.policy_set import policy_set
from pointsman_cli.console.jobs.explanations import timeline_of_request
from pointsman_cli.console.jobs.views import TimelineView
from pointsman_cli.history.sources import open_history
from tests.support.commands import written
from tests.support.recorded_log import RecordedFleet


def test_a_timeline_survives_its_json_which_has_the_arrival_without_the_keys(tmp_path: Path) -> None:
    entries = RecordedFleet(policy_set(), seed=9).live(300).write_all().entries
    file, decided = written(entries, tmp_path), 0
    arrivals = [(entry.sequence, entry.event) for entry in entries if isinstance(entry.event, RequestArrived)]
    with open_history(str(file)) as history:
        for sequence, event in arrivals[::10]:
            view = timeline_of_request(history, event.request, first=sequence)
            told = msgspec.json.encode(view)

            assert msgspec.json.decode(told, type=TimelineView) == view
            shown = msgspec.json.decode(told)
            logged = msgspec.to_builtins(event)
            assert shown["arrival"] == {n: v for n, v in logged.items() if n != "keys"} | {
                "blocks": len(event.keys) // 8
            }
            decided += len(shown["decisions"])
    assert decided
