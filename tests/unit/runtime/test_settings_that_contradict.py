"""Settings of a process that contradict each other, or name what there is not, are refused before anything starts."""

import click
import pytest

from pointsman.runtime.settings import ProcessSettings, command
from pointsman_cli.up.scripts import settings_type_of

OIDC = ("--oidc-issuer", "https://issuer.example", "--oidc-audience", "pointsman")


def read(table: str, *arguments: str) -> None:
    """Raises click.UsageError."""

    @command(settings_type_of(f"pointsman-{table}"), name=table, table=table)
    def process(settings: ProcessSettings) -> None:
        """Does nothing with them."""

    process.main(list(arguments), standalone_mode=False)


@pytest.mark.parametrize(
    ("table", "arguments", "complaint"),
    [
        ("ingress", OIDC[:2], "--oidc-issuer needs --oidc-audience"),
        ("ingress", OIDC[2:], "need --oidc-issuer: without it nobody is asked for a token"),
        ("ingress", ("--oidc-jwks-url", "https://issuer.example/jwks"), "need --oidc-issuer"),
        ("ingress", ("--oidc-issuer", "http://issuer.example", *OIDC[2:]), "must be an https URL"),
        ("ingress", (*OIDC, "--oidc-jwks-url", "http://issuer.example/jwks"), "must be an https URL"),
        ("ingress", ("--pool-tokenizer", "coder=/models/coder"), "not POOL=DIRECTORY with one of the pools default"),
        ("ingress", ("--pool-tokenizer", "default"), "not POOL=DIRECTORY"),
        ("ingress", ("--admin-host", ""), "must not be empty"),
        *(
            ("ingress", ("--media-hosts", host), "is no host: write")
            for host in ("https://a.example", "a.example:80", "a,b", "*")
        ),
        ("worker", ("--engine-url", "127.0.0.1:8000"), "no URL like http://"),
        ("worker", ("--engine-advertised-url", "10.0.0.1:8000"), "no URL like http://"),
        ("worker", ("--kv-endpoint", "127.0.0.1:5557"), "--kv-endpoint: 127.0.0.1:5557 is no ZMQ endpoint"),
        ("worker", ("--kv-replay-endpoint", "tcp://h"), "--kv-replay-endpoint: tcp://h is no ZMQ endpoint"),
        ("worker", ("--discover", "dns:h:8000", "--kv-endpoint", "{host}:5557"), "is no ZMQ endpoint"),
        ("worker", ("--dp-rank", "1", "--data-parallel-size", "2"), "give one of them"),
        ("scheduler", ("--leave-seconds", "2"), r"must be at least --suspect-seconds \(3\), not 2"),
        ("scaler", ("--split", "8+1"), r"9 instances are more than --max-instances \(8\)"),
        ("scaler", ("--provider", "process"), r"does not contain \{port\}"),
        ("scaler", ("--provider", "process", "--engine-command", "vllm serve m"), r"does not contain \{port\}"),
        ("scaler", ("--min-instances", "9"), r"--max-instances \(8\)"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    table: str, arguments: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(click.UsageError, match=complaint):
        read(table, *arguments)


@pytest.mark.parametrize(
    ("table", "arguments"),
    [
        ("ingress", OIDC),
        *(("ingress", ("--media-hosts", host)) for host in ("a.example", "*.A.example", "10.0.0.5", "fd00::5")),
        ("ingress", ("--oidc-issuer", "http://127.0.0.1:9", "--oidc-audience", "pointsman")),
        ("ingress", ("--pools", "coder", "--pool-tokenizer", "coder=/models/coder", "--pool-tokenizer", "coder=")),
        ("worker", ("--discover", "dns:h:8000", "--kv-endpoint", "tcp://{host}:5557")),
        ("worker", ("--kv-endpoint", "ipc:///run/kv", "--engine-advertised-url", "http://{host}:80")),
        ("scheduler", ("--leave-seconds", "3")),
        ("scaler", ("--split", "4+4")),
        ("scaler", ("--provider", "process", "--engine-command", "vllm serve m --port {port}")),
    ],
)
def test_those_that_agree_are_taken(table: str, arguments: tuple[str, ...]) -> None:
    read(table, *arguments)
