"""A variable that no process reads is named, once, and with what was probably meant."""

import pytest

from pointsman.runtime import environment_names
from pointsman.runtime.environment_names import unknown_variables, warn_of_variables
from tests.unit.runtime.conftest import LinesOf


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("POINTSMAN_POLCY", ["POINTSMAN_POLCY (did you mean POINTSMAN_POLICY?)"]),
        ("POINTSMAN_INGRES_PORT", None),
        ("POINTSMAN_TOMORROWS_KNOB", ["POINTSMAN_TOMORROWS_KNOB"]),
        ("POINTSMAN_REPORT_SECONDS", ["POINTSMAN_REPORT_SECONDS (it was removed: workers report every second)"]),
        ("POINTSMAN_POOL_FILE", None),  # no secret: not read from a file
        ("pointsman_port", []),
        ("POINTSMAN_PORT", []),
        ("POINTSMAN_CONFIG", []),
        ("POINTSMAN_SECRET_FILE", []),
        ("POINTSMAN_VLLM_EVICTION", []),
        ("PORT", []),
    ],
)
def test_a_misspelt_variable_is_named_and_a_known_one_is_not(variable: str, said: list[str] | None) -> None:
    found = unknown_variables([variable, "PATH"])

    if said is None:
        assert [name.partition(" ")[0] for name in found] == [variable]
    else:
        assert found == said


def test_all_of_them_are_one_warning_and_none_is_silence(monkeypatch: pytest.MonkeyPatch, lines_of: LinesOf) -> None:
    lines = lines_of(environment_names)
    monkeypatch.setenv("POINTSMAN_PORT", "1")
    warn_of_variables()
    assert lines == []

    monkeypatch.setenv("POINTSMAN_A_KNOB", "1")
    monkeypatch.setenv("POINTSMAN_B_KNOB", "2")
    warn_of_variables()
    assert [(line["log_level"], line["ignored"]) for line in lines] == [
        ("warning", "POINTSMAN_A_KNOB, POINTSMAN_B_KNOB")
    ]
