"""What sources say of engines, made valid targets or refused with a reason."""

from typing import Any

import click
import pytest

from pointsman.adapters.discovery.file import FileDiscovery, parse_engines
from pointsman.adapters.discovery.sources import source_of
from pointsman.adapters.discovery.targets import (
    NAME_LENGTH_MAX,
    TargetError,
    annotated_targets,
    by_rank,
    engine_targets,
    instance_name,
)
from pointsman.contracts.fleet import ANY_RANK
from pointsman.contracts.subjects import valid_name
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import completed_targets, listed_targets

POD: dict[str, Any] = {"name": "vllm-0", "host": "10.0.0.5"}


def test_annotations_give_ports_ranks_role_and_profile() -> None:
    targets = annotated_targets(
        {
            "pointsman.io/port": "9000",
            "pointsman.io/kv-port": "6000",
            "pointsman.io/kv-replay-port": "7000",
            "pointsman.io/data-parallel-size": "2",
            "pointsman.io/role": "prefill",
            "unrelated": "x",
        },
        **POD,
        port=8000,
        identity="uid",
        ready=False,
    )

    assert [(t.instance, t.dp_rank, t.url, t.kv_endpoint, t.kv_replay_endpoint) for t in targets] == [
        ("vllm-0-rank-0", 0, "http://10.0.0.5:9000", "tcp://10.0.0.5:6000", "tcp://10.0.0.5:7000"),
        ("vllm-0-rank-1", 1, "http://10.0.0.5:9000", "tcp://10.0.0.5:6001", "tcp://10.0.0.5:7001"),
    ]
    assert {(t.role, t.identity, t.ready) for t in targets} == {("prefill", "uid", False)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "0"),
        ("port", "70000"),
        ("port", "8000; rm"),
        ("kv-port", ""),
        ("kv-port", "٣"),
        ("kv-replay-port", "-1"),
        ("data-parallel-size", "1000000000"),
        ("data-parallel-size", "0"),
        ("role", "root"),
        ("engine-model", "../../etc"),
    ],
)
def test_a_wrong_annotation_is_refused_with_its_name(key: str, value: str) -> None:
    with pytest.raises(TargetError, match=r"vllm-0.*"):
        annotated_targets({f"pointsman.io/{key}": value}, **POD, port=8000)


@pytest.mark.parametrize(
    "url",
    ["", "10.0.0.5:8000", "ftp://h:1", "http://", "http://h:99999", "http://u:p@h:1", "http://h:1/?q", "http://h h:1",
     "http://h:1/\n", "http://[::1", "http://h:x"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError):
        engine_targets(url=url)


@pytest.mark.parametrize(
    "endpoint", ["tcp://h", "tcp://h:0", "tcp://h:70000", "http://h:1", "tcp://h:1 ", "inproc://x"]
)
def test_what_is_no_zmq_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(TargetError, match="no ZMQ endpoint"):
        engine_targets(url="http://h:1", kv_endpoint=endpoint)


def test_an_ipv6_host_keeps_its_brackets_in_templates() -> None:
    (target,) = engine_targets(url="http://[fd00::5]:8000", kv_endpoint="tcp://{host}:5557")

    assert target.kv_endpoint == "tcp://[fd00::5]:5557"
    assert target.instance == "fd00-5-8000"


@pytest.mark.parametrize("text", ["10.0.0.5-8000", "Pod_A.ns", "x" * 300, "-a-", "vllm/0", "a" * 64])
def test_any_name_is_made_valid(text: str) -> None:
    for suffix in ("", "-rank-1023"):
        made = instance_name(text, suffix)
        assert valid_name(made)
        assert made.endswith(suffix)


def test_long_names_stay_different() -> None:
    names = {instance_name("x" * 300 + str(number)) for number in range(100)}

    assert len(names) == 100
    assert {len(name) for name in names} == {NAME_LENGTH_MAX}


@pytest.mark.parametrize("text", ["", "...", "ü"])
def test_a_name_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(TargetError):
        instance_name(text)


def test_ranks_need_a_port() -> None:
    (target,) = engine_targets(url="http://h:1", kv_endpoint="ipc:///run/kv")

    with pytest.raises(TargetError, match="has no port"):
        by_rank(target, 2)
    with pytest.raises(TargetError, match="no ZMQ endpoint"):
        by_rank(engine_targets(url="http://h:1", kv_endpoint="tcp://h:65535")[0], 2)


def test_the_workers_settings_fill_what_a_source_leaves_open() -> None:
    settings = WorkerSettings(
        kv_endpoint="tcp://{host}:5557", kv_replay_endpoint="tcp://{host}:5567", role="decode", data_parallel_size=2
    )
    (open_one,) = engine_targets(url="http://10.0.0.5:8000")
    (decided,) = engine_targets(
        url="http://h:8000", data_parallel_size=1, role="prefill", kv_endpoint="tcp://other:1", name="n"
    )

    filled = [t for target in (open_one, decided) for t in completed_targets(target, settings)]

    assert [(t.instance, t.dp_rank, t.kv_endpoint, t.kv_replay_endpoint, t.role) for t in filled] == [
        ("10-0-0-5-8000-rank-0", 0, "tcp://10.0.0.5:5557", "tcp://10.0.0.5:5567", "decode"),
        ("10-0-0-5-8000-rank-1", 1, "tcp://10.0.0.5:5558", "tcp://10.0.0.5:5568", "decode"),
        ("n", ANY_RANK, "tcp://other:1", "tcp://h:5567", "prefill"),
    ]


def test_the_advertised_url_may_take_its_port_from_the_engines() -> None:
    """Of engines that a scaler starts on a host of a fleet: each has a port of its own, and listens for other hosts too."""
    settings = WorkerSettings(engine_url=("http://127.0.0.1:23456",), engine_advertised_url="http://10.0.0.1:{port}")

    (target,) = listed_targets(settings)

    assert (target.url, target.advertised_url) == ("http://127.0.0.1:23456", "http://10.0.0.1:23456")


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_url": ("http://a:1", "http://b:1"), "kv_endpoint": "tcp://a:5557"},
        {"engine_url": ("http://a:1", "http://b:1"), "instance": "one"},
        {"discover": ("dns:h:1",), "dp_rank": 1},
        {"discover": ("dns:h:1",), "engine_advertised_url": "http://a:1"},
        {"dp_rank": 1, "data_parallel_size": 2},
        {"engine_url": ("nonsense",)},
        {"kv_transfer_gb_per_s": 10.0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(click.UsageError):
        listed_targets(WorkerSettings(**settings))


@pytest.mark.parametrize(
    "settings", [{"fetches": True}, {"role_switching": True}, {"role": "prefill"}, {"role": "decode"}]
)
def test_transfers_have_a_speed_where_engines_make_them(settings: dict[str, Any]) -> None:
    assert len(listed_targets(WorkerSettings(kv_transfer_gb_per_s=10.0, **settings))) == 1


def test_without_sources_there_is_one_engine_and_with_them_only_theirs() -> None:
    assert [target.url for target in listed_targets(WorkerSettings())] == ["http://127.0.0.1:8000"]
    assert listed_targets(WorkerSettings(discover=("dns:h:1",))) == []


@pytest.mark.parametrize(
    "text",
    ["", "x:y", "file:", "dns:h", "dns:h:0", "dns:h:x", "dns::8000", "dns:a b:1", "srv:", "srv:a b", "dns:[::1]"],
)
def test_what_names_no_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        source_of(text)


def test_a_file_of_engines() -> None:
    content = b"""
    [[engine]]
    url = "http://10.0.0.5:8000"
    [[engine]]
    name = "gpu-2"
    url = "http://10.0.0.6:8000"
    kv_endpoint = "tcp://{host}:6000"
    data_parallel_size = 2
    identity = "7"
    ready = false
    """

    assert [(t.instance, t.kv_endpoint, t.ready, t.identity) for t in parse_engines(content)] == [
        ("10-0-0-5-8000", "", True, ""),
        ("gpu-2-rank-0", "tcp://10.0.0.6:6000", False, "7"),
        ("gpu-2-rank-1", "tcp://10.0.0.6:6001", False, "7"),
    ]
    assert parse_engines(b"engine = []") == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[[engine]",
        b"engine = 1",
        b"engine = [1]",
        b"[[engine]]\nname = 'a'",
        b"[[engines]]\nurl = 'http://h:1'",
        b"[[engine]]\nurl = 'http://h:1'\nport = 1",
        b"[[engine]]\nurl = 'http://h:1'\nready = 'yes'",
        b"[[engine]]\nurl = 'http://h:1'\ndata_parallel_size = true",
        b"[[engine]]\nurl = 'http://h:1'\n[[engine]]\nurl = 'http://h:1'",
        b"engine = " + b"[" * 50_000,
        b"#" * 5_000_000,
        b"".join(b"[[engine]]\nurl='http://h:%d'\ndata_parallel_size=1024\n" % port for port in range(1, 9000)),
    ],
    ids=range(14),
)
def test_a_file_that_is_wrong_anywhere_is_refused_whole(content: bytes) -> None:
    with pytest.raises(TargetError):
        parse_engines(content)


def test_the_name_of_a_source_is_as_written() -> None:
    assert [source_of(text).name for text in ("file:/x", "dns:h:1", "srv:_a._tcp.b")] == [
        "file:/x",
        "dns:h:1",
        "srv:_a._tcp.b",
    ]
    assert isinstance(source_of("file:/x"), FileDiscovery)
