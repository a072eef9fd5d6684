"""A fleet keeps its counts by what changes; a twin counts all instances anew after each change."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.contracts.fleet import Role
from pointsman.primitives import InstanceId
from pointsman.state.checkpoint import decode_state, encode_state
from pointsman.state.fleet import Fleet, Instance
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, reported

NAMES = st.sampled_from(["a", "b", "c", "d", "e"]).map(InstanceId)
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")
STANDINGS = ("ready", "ejected", "half open", "suspected")
JOINS = st.builds(
    lambda name, fields: ("join", name, fields),
    NAMES,
    st.fixed_dictionaries(
        {
            "epoch": st.integers(1, 4),
            "model": st.sampled_from(["", "m", "n", "o"]),
            "kv_capacity_tokens": st.integers(-1, 3),
            "fetches": st.booleans(),
            "role": st.sampled_from(ROLES),
            "role_switching": st.booleans(),
        }
    ),
)
OTHERS = st.one_of(
    st.tuples(st.just("report"), NAMES, st.booleans()),
    st.tuples(st.just("role"), NAMES, st.sampled_from(ROLES)),
    st.tuples(st.just("leave"), NAMES, st.none()),
    st.tuples(st.just("restart"), NAMES, st.none()),
)


@given(st.lists(st.one_of(JOINS, OTHERS), min_size=20, max_size=40), st.integers(0, 80), st.booleans())
def test_counts_kept_by_what_changes_are_those_counted_anew(
    changes: list[tuple[str, Any, Any]], checkpoint_at: int, checks: bool
) -> None:
    state = State(PoolSettings())
    state.fleet = Fleet(checks_model=checks)
    model = ""
    for number, (kind, name, told) in enumerate(changes, 1):
        if number == checkpoint_at:
            state.fleet = decode_state(encode_state(state)).fleet
        fleet = state.fleet
        _change(fleet, kind, name, told, number)
        model = most_served(fleet.instances) or model if checks else ""
        fitting = [instance for instance in fleet.instances if not checks or instance.model == model]

        assert fleet.model == model
        assert [i.id for i in fleet.instances if not i.unschedulable] == [i.id for i in fitting]
        assert all(f"the pool {model!r}" in i.unschedulable for i in fleet.instances if i not in fitting)
        assert fleet.kv_capacity_tokens == sum(max(0, i.kv_capacity_tokens) for i in fleet.instances)
        assert fleet.fetches == (len([i for i in fitting if i.fetches]) > 1)
        assert fleet.split == any(i.role != "both" for i in fitting)


class Listing(dict[InstanceId, Instance]):
    """Counts how often all instances are looked through."""

    times = 0

    @override
    def __iter__(self) -> Iterator[InstanceId]:
        self.times += 1
        return super().__iter__()

    @override
    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_a_change_of_one_instance_looks_through_no_others() -> None:
    """3,000 joins took longer than a lease."""
    names = [InstanceId(f"engine-{number:02}") for number in range(40)]
    fleet = Fleet()
    listing = fleet._instances = Listing()
    for name in names:
        fleet.join(joined(name))
        fleet.apply_report(reported(name, 0, []), 1, clock_may_go_back=True)
    for name in names[1:]:
        fleet.suspect(name)
    assert fleet.ready == ("engine-00",)
    for name in names[1:]:
        fleet.leave(name)
        assert fleet.ready == ("engine-00",)

    assert listing.times <= 4


@dataclass(frozen=True)
class Length:
    """A prompt that demands nothing else."""

    context_tokens: int
    adapter: str = ""
    alias: str = ""


@pytest.mark.parametrize("leaving", list(product(ROLES, STANDINGS, (1, 2))))
def test_who_serves_once_an_instance_has_left_is_who_would_if_it_had_never_been_there(
    leaving: tuple[Role, str, int],
) -> None:
    """The list is kept where it can be: 3,000 that leave together took a minute."""
    for others in combinations_with_replacement(product(ROLES, STANDINGS, (1, 2)), 2):
        fleet, without = fleet_of(*others, leaving), fleet_of(*others)
        assert set(fleet.ready) <= fleet.able  # it is listed
        fleet.leave(InstanceId("e2"))

        assert served(fleet) == served(without), f"beside {others}"


def fleet_of(*kinds: tuple[Role, str, int]) -> Fleet:
    fleet = Fleet()
    for number, (role, standing, length) in enumerate(kinds):
        name = InstanceId(f"e{number}")
        fleet.join(joined(name, role=role, max_model_len=length))
        if standing == "suspected":
            fleet.suspect(name)
        elif standing == "ejected":
            fleet.eject(name)
        elif standing == "half open":
            fleet.uneject(name, half_open=True)
    return fleet


def served(fleet: Fleet) -> Sequence[object]:
    by_length = [fleet.ready_for(Length(tokens)) for tokens in (1, 2)]
    return fleet.ready, fleet.decoders, fleet.able, fleet.on_trial, by_length


def most_served(instances: Sequence[Instance]) -> str:
    """Of those that have served, else of all; ties go to the model served longest, then by name."""
    voting = [i for i in instances if i.counted] or list(instances)
    votes = Counter(i.model for i in voting)
    voting.sort(key=lambda i: (-votes[i.model], i.model_since, i.id))
    return voting[0].model if voting else ""


def _change(fleet: Fleet, kind: str, name: InstanceId, told: Any, number: int) -> None:
    if kind == "join":
        fleet.join(joined(name, **told))
    elif name not in fleet:
        return
    elif kind == "report":
        fleet.apply_report(reported(name, 0, [], serving=told), number, clock_may_go_back=True)
    elif kind == "role":
        role: Role = told
        fleet.change_role(name, role)
    elif kind == "leave":
        fleet.leave(name)
    else:
        fleet.note_restart(name, number)
