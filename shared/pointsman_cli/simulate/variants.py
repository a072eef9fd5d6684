"""The compared variants: a routing policy with its settings, an ordering and an admission policy."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from pointsman.contracts.decisions import Settings
from pointsman.policies.policy_set import UnknownPolicyError, policy_set
from pointsman.policies.setting_text import SettingTextError, parts_of
from pointsman.simulation.scenario import Scenario

ROUTING = "routing"
OTHER_KINDS = ("admission", "order", "pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`policy`: the routing policy with the settings that vary; `routing`: its name alone. `note`: other conditions of
    this variant."""

    policy: str
    routing: str
    ordering: str
    admission: str
    settings: Settings = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.called} {self.ordering} {self.admission}"

    @property
    def called(self) -> str:
        return f"{self.routing}, {self.note}" if self.note else self.policy

    def applied_to(self, scenario: Scenario) -> Scenario:
        return replace(
            scenario,
            routing=self.routing,
            routing_settings=self.settings,
            ordering=self.ordering,
            admission=self.admission,
        )

    def label(self, among: Iterable["Variant"]) -> str:
        others = list(among)
        parts = [self.called]
        if len({other.ordering for other in others}) > 1:
            parts.append(self.ordering)
        if len({other.admission for other in others}) > 1:
            parts.append(self.admission)
        return " + ".join(parts)


def variants(
    policies: Sequence[str], orderings: Sequence[str], admissions: Sequence[str], settings: Sequence[str] = ()
) -> list[Variant]:
    """Every combination, in the given order. `settings`: KIND.NAME=VALUE[,VALUE]; KIND may be a policy. Raises
    UnknownPolicyError for an unknown name or setting."""
    given = [_setting(text, policies) for text in settings]
    found = []
    for routing in policies:
        own = [(name, values) for kind, name, values in given if kind in (ROUTING, routing)]
        own += [(f"{kind}.{name}", values) for kind, name, values in given if kind in OTHER_KINDS]
        for called, chosen in _choices(routing, own):
            for ordering, admission in product(orderings, admissions):
                policy_set(routing=routing, ordering=ordering, admission=admission, settings=chosen)
                found.append(
                    Variant(policy=called, routing=routing, ordering=ordering, admission=admission, settings=chosen)
                )
    return found


def _choices(routing: str, given: Sequence[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, Settings]]:
    """Every combination of the values, named by those that vary."""
    for values in product(*(values for _, values in given)):
        chosen: Settings = {name: value for (name, _), value in zip(given, values, strict=True)}
        varied = [f"{name}={chosen[name]}" for name, each in given if len(each) > 1]
        yield ":".join((routing, *varied)), chosen


def _setting(text: str, policies: Sequence[str]) -> tuple[str, str, list[str]]:
    try:
        kind, name, value = parts_of(text)
    except SettingTextError as error:
        raise UnknownPolicyError(str(error)) from error
    if kind not in (ROUTING, *OTHER_KINDS, *policies):
        raise UnknownPolicyError(f"--set {text}: {kind} is not among the policies")
    return kind, name, value.split(",")
