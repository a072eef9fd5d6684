"""No number of a setting may be one with which a process could not work."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

import click
import pytest

from pointsman.contracts.decisions import Settings
from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import UnknownPolicyError, policy_set, rebalancing_policy, scaling_policy
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.policies.scaling import SCALING_POLICIES
from tests.support.settings_types import COMMANDS

MAY_BE_NEGATIVE = {("worker", "dp_rank"): "-1: any"}
ZERO_MAKES_NO_SENSE = [
    *(("ingress", name) for name in ("slo_ttft_seconds", "slo_tpot_seconds", "body_bytes_max")),
    *(("ingress", name) for name in ("request_timeout_seconds", "scheduler_timeout_seconds", "processes")),
    *(("scheduler", name) for name in ("prefill_window_tokens", "running_max", "pending_max", "suspect_seconds")),
    *(("scheduler", name) for name in ("leave_seconds", "lease_seconds", "request_seconds_max")),
    *(
        ("scheduler", name)
        for name in ("speed", "log_bytes_max", "log_age_seconds_max", "log_replicas", "block_tokens")
    ),
    *(("scaler", name) for name in ("step_up", "step_down", "start_seconds_max")),
    *(("engine-sim", name) for name in ("speed", "block_size", "max_model_len", "max_num_batched_tokens")),
    *(("up", name) for name in ("schedulers", "ingresses", "speed", "slo_ttft", "block_tokens", "kv_blocks")),
]
NO_NUMBERS = ["nan", "inf", "-inf", "-1", "-0.5", "1" + 31 * "0"]


def numbers() -> Iterator[tuple[str, str]]:
    """Table and name of each setting whose default, or whose type, is a number."""
    for table, command in COMMANDS.items():
        for option in command.params:
            default = option.get_default(click.Context(command), call=False)
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            if is_number or isinstance(option.type, click.IntRange | click.FloatRange):
                yield table, str(option.name)


def refused(table: str, name: str, value: str) -> str:
    """What the command says; empty if it takes the value."""
    flag = "--" + name.replace("_", "-")
    try:
        COMMANDS[table].make_context(table, [f"{flag}={value}"])
    except click.BadParameter as error:
        return error.format_message()
    return ""


def test_no_setting_is_a_bare_number() -> None:
    bare = [
        (table, option.name)
        for table, command in COMMANDS.items()
        for option in command.params
        if option.type in (click.INT, click.FLOAT)
    ]

    assert bare == []
    assert len(list(numbers())) > 80


@pytest.mark.parametrize(("table", "name"), list(numbers()), ids=".".join)
def test_a_number_that_is_none_or_negative_is_refused_by_its_flag(table: str, name: str) -> None:
    for value in NO_NUMBERS:
        if (table, name) in MAY_BE_NEGATIVE and value == "-1":
            assert not refused(table, name, value)
        else:
            said = refused(table, name, value)
            assert "--" + name.replace("_", "-") in said, value
            assert "\n" not in said


@pytest.mark.parametrize(("table", "name"), ZERO_MAKES_NO_SENSE, ids=".".join)
def test_zero_is_refused_where_nothing_would_work_with_it(table: str, name: str) -> None:
    assert refused(table, name, "0")


@pytest.mark.parametrize(
    ("flag", "routing", "value", "refusal"),
    [
        (("scheduler", "leave_seconds"), ("preble", "window_s"), "0", "must be above 0, not 0.0"),
        (("scheduler", "running_max"), ("dualmap", "candidates"), "0", "must be at least 1, not 0"),
        (("ingress", "retry_budget"), ("", ""), "-0.5", "must be at least 0, not -0.5"),
        (("ingress", "port"), ("", ""), "65536", "must be at least 0 and at most 65535, not 65536"),
        (("scheduler", "leave_seconds"), ("preble", "window_s"), "inf", "must be a finite number, not inf"),
    ],
    ids=str,
)
def test_an_option_and_a_policy_refuse_a_number_in_the_same_words(
    flag: tuple[str, str], routing: tuple[str, str], value: str, refusal: str
) -> None:
    assert refused(*flag, value).endswith(f": {refusal}")
    name, setting = routing
    if setting:
        with pytest.raises(UnknownPolicyError, match=f"{setting} {refusal}$"):
            policy_set(routing=name, settings={setting: value})


POLICIES: dict[str, Mapping[str, type]] = {
    "routing": ROUTING_POLICIES,
    "admission": ADMISSION_POLICIES,
    "ordering": ORDERING_POLICIES,
    "rebalancing": REBALANCING_POLICIES,
    "scaling": SCALING_POLICIES,
}


def build(kind: str, name: str, settings: Settings) -> object:
    match kind:
        case "rebalancing":
            return rebalancing_policy(name, settings)
        case "scaling":
            return scaling_policy(name, settings)
        case "routing":
            return policy_set(routing=name, settings=settings)
        case "admission":
            return policy_set(admission=name, settings={f"admission.{key}": value for key, value in settings.items()})
        case _:
            return policy_set(ordering=name, settings={f"order.{key}": value for key, value in settings.items()})


def policy_numbers() -> Iterator[tuple[str, str, str]]:
    for kind, policies in POLICIES.items():
        for name, policy in policies.items():
            yield from ((kind, name, setting) for setting in numbers_of(policy()))


def numbers_of(policy: object) -> list[str]:
    values = {one.name: getattr(policy, one.name) for one in fields(policy)}  # type: ignore[arg-type]  # all are dataclasses
    return [name for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)]


@pytest.mark.parametrize(("kind", "name", "setting"), list(policy_numbers()), ids=str)
def test_a_number_of_a_policy_that_is_none_or_negative_is_refused(kind: str, name: str, setting: str) -> None:
    for value in NO_NUMBERS:
        with pytest.raises(UnknownPolicyError) as caught:
            build(kind, name, {setting: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["pair", "outlier"])
def test_so_is_one_of_pairing_and_of_outlier_detection(kind: str) -> None:
    policy = policy_set().decode_placement if kind == "pair" else policy_set().outliers
    for name in numbers_of(policy):
        for value in NO_NUMBERS:
            with pytest.raises(UnknownPolicyError, match=name):
                policy_set(settings={f"{kind}.{name}": value})
