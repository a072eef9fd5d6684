"""What an engine's own pages say is believed only as far as it can be true, and reading them costs little whatever they hold."""

import math
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pointsman.adapters.http_engine import (
    CAPACITY_TOKENS_MAX,
    COUNT_MAX,
    LISTED_MAX,
    METRICS_BYTES_MAX,
    MODELS_BYTES_MAX,
    NAME_BYTES_MAX,
    NAMES_BYTES_MAX,
    NAMES_MAX,
    FurtherNames,
    ListedModels,
    cache_size,
    listed_models,
    load_in,
)
from pointsman.primitives import BLOCK_TOKENS_MAX

METRICS = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m {x} \\"y\\""} 4.0
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_waiting_by_reason{reason="x"} 99.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000",engine="0"} 1.0
"""
MODELS = b'{"data":[{"id":"m","max_model_len":4096},{"id":"m-latest"},{"id":"poet","parent":"m"}]}'

NONSENSE = ["NaN", "-NaN", "Inf", "+Inf", "-Inf", "1e400", "-1", "9" * 5000, "0x10", "", "1_0", "٣", "true", "1e309"]


@pytest.mark.parametrize("value", ["NaN", "Inf", "-Inf", "1e400", "-1", "", "none"])
def test_a_metric_that_cannot_be_true_counts_as_not_said_and_hides_no_other(value: str) -> None:
    page = METRICS.replace(" 4.0", f" {value}")

    assert (load_in(page).waiting, load_in(page).running, load_in(page).kv_usage) == (0, 7, 0.25)
    assert load_in(METRICS.replace(" 0.25", f" {value}")).kv_usage == 0.0


def test_metrics_are_read_as_before_where_they_are_sound() -> None:
    load = load_in(METRICS)

    assert (load.waiting, load.running, load.kv_usage) == (4, 7, 0.25)
    assert cache_size(METRICS) == (16, 16_000)
    assert load_in(METRICS.rstrip("\n").replace(" 0.25", " 1.01")).kv_usage == 0.0


@pytest.mark.parametrize("size", ["9" * 5000, "-16", "1.5", "", str(BLOCK_TOKENS_MAX + 1), "²"])
def test_a_block_size_that_cannot_be_true_is_not_said(size: str) -> None:
    assert cache_size(METRICS.replace('block_size="16"', f'block_size="{size}"'))[0] == 0


@pytest.mark.parametrize("length", [0, -1, 1.5, 10**400, COUNT_MAX + 1, "4096", None, [], True])
def test_a_length_that_cannot_be_true_is_not_said(length: object) -> None:
    body = b'{"data":[{"id":"m","max_model_len":%s}]}' % msgspec.json.encode(length)

    assert listed_models(body) == ListedModels("m", 0, FurtherNames())


@pytest.mark.parametrize("name", ["", "a" * (NAME_BYTES_MAX + 1), "a\nb", "\x1b]0;x", "\u202e", 7, None, ["m"]])
def test_what_is_no_name_names_neither_a_model_nor_an_adapter(name: object) -> None:
    listed = msgspec.json.encode({"data": [{"id": "m"}, {"id": name, "parent": "m"}, {"id": "poet", "parent": "m"}]})
    read = listed_models(listed)

    assert read is not None
    assert read.further_names.adapters == ("poet",)
    assert listed_models(msgspec.json.encode({"data": [{"id": name}]})) is None


def names_of(*models: dict[str, Any]) -> FurtherNames:
    read = listed_models(msgspec.json.encode({"data": models}))
    assert read is not None
    return read.further_names


def test_of_too_many_names_the_first_are_kept_and_the_others_counted() -> None:
    short = [{"id": f"n{number}", "parent": "m"} for number in range(20_000)]
    long = [{"id": f"{number:0255}"} for number in range(200)]
    few, large = names_of({"id": "m"}, *short), names_of({"id": "m"}, *long)

    assert few.adapters == tuple(model["id"] for model in short[:NAMES_MAX])
    assert few.dropped == 20_000 - NAMES_MAX
    assert large.aliases == tuple(model["id"] for model in long[: NAMES_BYTES_MAX // 255])
    assert large.dropped == 200 - len(large.aliases)


def test_models_beyond_those_that_are_looked_at_are_counted() -> None:
    names = names_of({"id": "m"}, *[{"id": "m"}] * (LISTED_MAX - 2), {"id": "last"}, {"id": "beyond"})

    assert names == FurtherNames(aliases=("last",), dropped=1)


def test_a_list_as_vllm_writes_it_is_read() -> None:
    permission = [
        {"id": "modelperm-1", "object": "model_permission", "created": 1, "allow_sampling": True, "group": None}
    ]
    card = {"object": "model", "created": 1, "owned_by": "vllm", "root": "/models/m", "permission": permission}
    base = card | {"id": "m", "parent": None, "max_model_len": 4096}
    poet = card | {"id": "poet", "parent": "m", "max_model_len": None}
    body = msgspec.json.encode({"object": "list", "data": [base, base | {"id": "alias"}, poet]})

    assert listed_models(body) == ListedModels("m", 4096, FurtherNames(("alias",), ("poet",)))


@pytest.mark.parametrize("field", ["id", "parent", "max_model_len", "permission"])
def test_what_a_model_is_said_to_have_is_not_built_unless_it_is_read(field: str) -> None:
    lists = b"[[]%b]" % (b",[]" * (MODELS_BYTES_MAX // 3))
    body = b'{"data":[{"%b":%b,"id":"m"},{"id":"poet","parent":"m"}]}' % (field.encode(), lists)
    tracemalloc.start()
    read = listed_models(body)
    _, bytes_most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert bytes_most < 64 * 1024
    assert read is not None
    assert read.max_model_len == 0


def mangled(chance: random.Random, page: str) -> str:
    """The page with some of it cut out, repeated, swapped, or replaced by nonsense."""
    for _ in range(chance.randint(1, 6)):
        a, b = sorted(chance.randrange(len(page) + 1) for _ in range(2))
        b = min(b, a + chance.choice([1, 5, 60]))
        page = (
            page[:a]
            + chance.choice(["", page[a:b] * 3, *NONSENSE, "\n", "\x00", "{", '"', "[" * 2000, "\ud800"])
            + page[b:]
        )
    return page


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_said_what_is_believed_is_in_range_and_can_be_written_down(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        metrics = mangled(chance, METRICS)
        models = mangled(chance, MODELS.decode()).encode(errors="surrogatepass")
        rank = chance.choice([-1, 0, 1])
        load, (block, capacity) = load_in(metrics, rank), cache_size(metrics, rank)
        read = listed_models(models) or ListedModels("m", 0, FurtherNames())
        model, length, names = read.model, read.max_model_len, read.further_names

        assert 0 <= load.waiting <= COUNT_MAX, seed
        assert 0 <= load.running <= COUNT_MAX, seed
        assert 0.0 <= load.kv_usage <= 1.0, seed
        assert math.isfinite(load.kv_usage)
        assert 0 <= block <= BLOCK_TOKENS_MAX, seed
        assert 0 <= capacity <= CAPACITY_TOKENS_MAX, seed
        assert 0 <= length <= COUNT_MAX, seed
        for name in (model, *names.aliases, *names.adapters):
            assert name, seed
            assert name.isprintable(), seed
            assert len(name.encode()) <= NAME_BYTES_MAX, seed
        assert msgspec.json.decode(msgspec.json.encode([model, names.aliases, load.kv_usage])), seed


HOSTILE: dict[str, Callable[[int], str]] = {
    "empty lines": lambda size: "\n" * size,
    "names without samples": lambda size: "\nvllm:" * (size // 6),
    "beginnings of names": lambda size: "\nvllm:num_requests_" * (size // 19),
    "samples": lambda size: 'vllm:num_requests_waiting{engine="0"} 1.0\n' * (size // 42),
    "one line": lambda size: "vllm:cache_config_info{" + "a" * size,
    "a name again and again": lambda size: "vllm:cache_config_info{" * (size // 23),
    "labels": lambda size: ("vllm:cache_config_info{" + ',a="' * 1000 + "} 1\n") * (size // 4027),
    "unclosed labels": lambda size: ("vllm:cache_config_info{" + "{" * 4000 + "} 1\n") * (size // 4027),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_a_page_of_metrics_takes_time_in_proportion_to_it_whatever_it_holds(name: str) -> None:
    """Some 0.1 s for the largest page there can be; what is quadratic would take minutes."""
    page = HOSTILE[name](METRICS_BYTES_MAX)
    began = time.process_time()
    load_in(page)
    cache_size(page)

    assert time.process_time() - began < 5.0
