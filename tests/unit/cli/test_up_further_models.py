"""`pointsman up --also MODEL=ENGINES`: what is asked for, and the processes that come of it."""

import click
import pytest

from pointsman.runtime.settings import options
from pointsman_cli.up.addresses import EngineAddress
from pointsman_cli.up.processes import processes
from pointsman_cli.up.settings import UpSettings, further_pools
from pointsman_ingress.settings import IngressSettings
from tests.support.up import plan_of


def test_each_further_model_has_a_pool_that_is_named_after_it() -> None:
    also = ("Qwen/Qwen2.5-Coder 7B=2", "other=http://a:8000#kv=tcp://a:5557,http://b:8000")
    coder, other = further_pools(UpSettings(also=also))

    assert (coder.pool, coder.model, coder.instances) == ("qwen-qwen2-5-coder-7b", "Qwen/Qwen2.5-Coder 7B", 2)
    assert other.addresses == (EngineAddress("http://a:8000", "tcp://a:5557"), EngineAddress("http://b:8000"))


@pytest.mark.parametrize("also", [("coder",), ("=2",), ("coder=",), ("coder=0",), ("a=1", "A=1"), ("default=1",)])
def test_what_names_no_model_or_no_engines_is_refused(also: tuple[str, ...]) -> None:
    with pytest.raises(click.BadParameter):
        further_pools(UpSettings(also=also))


def test_a_further_pool_has_keys_of_the_size_that_it_is_told_else_those_of_the_first() -> None:
    also = ("coder=1", "a=http://a:8000#block_tokens=128")
    asked = UpSettings(instances="1", block_tokens=32, also=also)
    planned = {process.name: process for process in processes(plan_of(asked))}

    told = {name: process.environment.get("POINTSMAN_BLOCK_TOKENS") for name, process in planned.items()}
    assert (told["scheduler"], told["worker-1"]) == ("32", "32")
    assert (told["coder-scheduler"], told["coder-worker-1"]) == ("32", "32")
    assert (told["a-scheduler"], told["a-rebalancer"], told["a-worker-1"]) == ("128", "128", "128")
    assert told["ingress"] is None


@pytest.mark.parametrize(
    "engines",
    ["1#block_tokens=0", "1#block_tokens=many", "http://a#block_tokens=1,http://b#block_tokens=2", "1#block=128"],
)
def test_a_size_of_keys_that_is_no_number_or_not_one_for_the_pool_is_refused(engines: str) -> None:
    with pytest.raises(click.BadParameter, match=f"'coder={engines}'"):
        further_pools(UpSettings(also=(f"coder={engines}",)))


def test_every_pool_has_a_scheduler_and_engines_and_one_ingress_serves_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = processes(plan_of(UpSettings(instances="1", lora=("poet",), also=("coder=1", "other=http://a:8000"))))
    pools = {process.name: process.environment["POINTSMAN_POOL"] for process in planned if process.role == "scheduler"}
    (ingress,) = [process for process in planned if process.role == "ingress"]
    for name, value in ingress.environment.items():
        monkeypatch.setenv(name, value)
    told = click.Command("ingress", params=list(options(IngressSettings))).make_context("ingress", []).params

    assert pools == {"scheduler": "default", "coder-scheduler": "coder", "other-scheduler": "other"}
    assert (told["pools"], told["pool_tokenizer"]) == (("default", "coder", "other"), ("coder=builtin", "other="))
    names = [process.name for process in planned]
    assert len(names) == len(set(names))
    assert {"engine-1", "worker-1", "coder-engine-1", "coder-worker-1", "other-worker-1"} <= set(names)
    engines = {process.name: process.arguments for process in planned if process.role == "engine"}
    assert ["poet=poet" in arguments for arguments in engines.values()] == [True, False]
