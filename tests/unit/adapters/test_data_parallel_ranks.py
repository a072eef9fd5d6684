"""One engine with several data-parallel ranks: each is an instance with events, load and capacity of its own."""

import pytest

from pointsman.adapters.discovery.targets import rank_endpoint
from pointsman.adapters.http_engine import cache_size, load_in
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import listed_targets

METRICS = """\
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="200"} 1.0
"""


def test_each_rank_publishes_on_the_port_that_follows() -> None:
    assert [rank_endpoint("tcp://*:5557", rank) for rank in (0, 1, 2)] == [
        "tcp://*:5557",
        "tcp://*:5558",
        "tcp://*:5559",
    ]
    assert rank_endpoint("", 1) == ""
    assert rank_endpoint("ipc:///run/kv", 0) == "ipc:///run/kv"


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "tcp://host", "inproc://kv"])
def test_where_there_is_no_port_there_are_no_ranks(endpoint: str) -> None:
    with pytest.raises(ValueError, match="has no port"):
        rank_endpoint(endpoint, 1)


def test_load_and_capacity_are_those_of_the_rank_or_of_all() -> None:
    assert [load_in(METRICS, rank).waiting for rank in (0, 1, -1)] == [1, 4, 5]
    assert [load_in(METRICS, rank).kv_usage for rank in (0, 1, -1)] == [0.25, 0.5, 0.5]
    assert [cache_size(METRICS, rank) for rank in (0, 1, -1)] == [(32, 3200), (32, 6400), (32, 9600)]


def test_ranks_of_one_engine_have_names_of_their_own() -> None:
    url = ("http://e:8000",)
    alone = [listed_targets(WorkerSettings(engine_url=url, dp_rank=rank))[0].instance for rank in (-1, 0, 1)]
    all_ranks = listed_targets(WorkerSettings(engine_url=url, data_parallel_size=2, kv_endpoint="tcp://e:5557"))

    assert alone == ["engine-8000", "engine-8000-rank-0", "engine-8000-rank-1"]
    assert [(target.instance, target.dp_rank, target.kv_endpoint) for target in all_ranks] == [
        ("engine-8000-rank-0", 0, "tcp://e:5557"),
        ("engine-8000-rank-1", 1, "tcp://e:5558"),
    ]
