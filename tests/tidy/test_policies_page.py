"""docs/policies.md names every policy, its settings and their defaults."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.decode_placement import DEFAULT_DECODE_PLACEMENT
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.outliers import DEFAULT_OUTLIER_DETECTION
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.scaling import SCALING_POLICIES

PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text()
SECTIONS: dict[str, Mapping[str, type]] = {
    "Routing": ROUTING_POLICIES,
    "Admission": ADMISSION_POLICIES,
    "Ordering": ORDERING_POLICIES,
    "Rebalancing": REBALANCING_POLICIES,
    "Scaling": SCALING_POLICIES,
}


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("heading", "name"), [(heading, name) for heading, policies in SECTIONS.items() for name in policies]
)
def test_the_page_has_each_policy_with_its_settings_and_defaults(heading: str, name: str) -> None:
    policy = SECTIONS[heading][name]()
    rows = [line for line in section(heading).splitlines() if line.startswith(f"| `{name}`")]
    text = section(heading) if name in {DEFAULT_ROUTING, "global", "work_stealing"} else "".join(rows)

    assert rows
    assert [field.name for field in fields(policy) if not names(text, field.name, getattr(policy, field.name))] == []


def test_the_page_has_the_settings_of_pairing_and_of_outlier_detection() -> None:
    pairing, outliers = DEFAULT_DECODE_PLACEMENT, DEFAULT_OUTLIER_DETECTION

    assert [
        f.name for f in fields(pairing) if not names(section("Pairing"), f"pair.{f.name}", getattr(pairing, f.name))
    ] == []
    assert [
        f.name
        for f in fields(outliers)
        if not names(section("Outlier detection"), f"outlier.{f.name}", getattr(outliers, f.name))
    ] == []


def names(text: str, setting: str, default: object) -> bool:
    """Whether the text has the setting and, in brackets behind it, its default."""
    match = re.search(rf"`{re.escape(setting)}` \(([^);:]*)", text)
    return match is not None and match[1].strip("` ").split(" ")[0].replace(",", "") in spellings(default)


def spellings(default: object) -> set[str]:
    if isinstance(default, bool):
        return {str(default).lower()}
    if isinstance(default, int | float):
        return {f"{default:g}", str(default), str(int(default))}
    return {str(default) if default else "none"}
