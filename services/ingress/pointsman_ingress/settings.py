"""Settings of an ingress. `runtime.settings` combines flags, environment and file."""

import os
import re
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import click
from typing_extensions import override

from pointsman.adapters.tcp_ports import is_loopback
from pointsman.bounds import COUNT, PORT, POSITIVE, Bounds
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.engine_keys import EngineKeySettings
from pointsman.runtime.engine_urls import EngineUrlSettings
from pointsman.runtime.processes import PROCESSES_MAX
from pointsman.runtime.settings import TEXT, DeploymentSettings, PoolNameType, ProcessSettings, SecretSettings, setting

ANY_ORIGIN = "*"


class PatternType(click.ParamType[str]):
    """A text that is taken in lower case. `expected`: what to write instead of one that does not match."""

    def __init__(self, name: str, pattern: str, expected: str) -> None:
        self.name = name
        self._pattern = re.compile(pattern)
        self._expected = expected

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).lower()
        if not self._pattern.fullmatch(text):
            self.fail(f"'{value}' is no {self.name}: write {self._expected}", param, ctx)
        return text


_ORIGIN = PatternType("origin", r"[a-z][a-z0-9+.-]*://[^\s/?#*,@]+|\*", "SCHEME://HOST[:PORT] without a path, or *")
_MEDIA_HOST = PatternType(
    "host",
    r"(\*\.)?[\w-]+(\.[\w-]+)*|[0-9a-f.]*(:[0-9a-f.]*){2,}",
    "images.example or *.images.example, without scheme and port",
)


@dataclass(frozen=True, kw_only=True)
class IngressSettings(DeploymentSettings, SecretSettings, EngineUrlSettings, EngineKeySettings, ProcessSettings):
    port: int = setting(8080, "Port of the API; 0 takes a free one.", bounds=PORT)
    admin_port: int = setting(
        8081,
        "Port of /livez, /readyz, /health, /metrics and /openapi.json, which need no key, and of /kv/overlap; 0 takes a free one.",
        bounds=PORT,
    )
    admin_host: str = setting("127.0.0.1", "Address that the admin port listens on.", form=TEXT)
    tls_certificate: str = setting(
        "", "PEM file with the certificate of the API's port and those that sign it; makes TLS mandatory there."
    )
    tls_key: str = setting("", "PEM file with its private key. Both are read again when they change.")
    name: str = setting("", "Name of this ingress in the log, which no other may have; by default ingress-HOST-PID.")
    processes: int = setting(
        1,
        "Processes that share the port, about one per core. Each is an ingress of its own, NAME-1, NAME-2, ...; "
        "/metrics of any of them covers all.",
        bounds=Bounds(1, PROCESSES_MAX),
    )
    pools: tuple[str, ...] = setting(
        (),
        "Pool to serve on this address, one per model; may be given several times. Default: the one of --pool.",
        form=PoolNameType(),
    )
    tokenizer: str = setting(
        "",
        "Directory with the model's tokenizer.json (and chat template), or 'builtin'. "
        "Without one the engines' /tokenize is asked, which costs a round trip.",
    )
    pool_tokenizer: tuple[str, ...] = setting(
        (),
        "POOL=DIRECTORY: tokenizer of one of several pools, instead of --tokenizer. May be given several times.",
    )
    require_keys: bool = setting(
        False, "Admit only clients with an API key (pointsman keys) or, with --oidc-issuer, a token."
    )
    oidc_issuer: str = setting("", "URL of the OIDC issuer whose tokens (JWT) are accepted; `iss` of the tokens.")
    oidc_audience: str = setting("", "Audience that such a token must name (`aud`).")
    oidc_jwks_url: str = setting("", "URL of the issuer's JWKS document. Default: what its discovery document names.")
    oidc_tenant_claim: str = setting("sub", "Claim of a token that names the tenant.")
    cors_origin: tuple[str, ...] = setting(
        (),
        "Origin of web pages that browsers may let use the API, as https://chat.example, or * for any; may be given several "
        "times. Without one no page of another origin can.",
        form=_ORIGIN,
    )
    slo_ttft_seconds: float = setting(5.0, "TTFT SLO of requests that name none, engine seconds.", bounds=POSITIVE)
    slo_tpot_seconds: float = setting(0.1, "TPOT SLO of requests that name none, engine seconds.", bounds=POSITIVE)
    body_bytes_max: int = setting(8 * 1024 * 1024, "Largest request body; a larger one gets 413.", bounds=COUNT)
    connections_per_address: int = setting(
        0,
        "Open connections of one client address at most (IPv6: of one /64); 0: half of all. Behind a load balancer all "
        "come from its address.",
    )
    request_timeout_seconds: float = setting(
        600.0,
        "Wall seconds after which a request is given up with 408; shorter than the schedulers' --request-seconds-max.",
        bounds=POSITIVE,
    )
    keep_alive_seconds: int = setting(
        75, "Wall seconds that an idle client connection is kept; longer than your load balancer's.", bounds=COUNT
    )
    lame_duck_seconds: float = setting(
        5.0,
        "Wall seconds after SIGTERM during which requests are still accepted, while /readyz answers 503 and each answer "
        "says connection: close. As long as load balancers need to notice.",
    )
    drain_seconds_max: float = setting(
        600.0,
        "Wall seconds after the lame duck that requests in flight may take to finish; those left are cut with an error event.",
    )
    retries_max: int = setting(2, "How often a request is sent to another engine when one fails before its first byte.")
    retry_budget: float = setting(
        0.6,
        "Share of a pool's live requests in this ingress that may be retried at once (10 always may); others get 503.",
    )
    first_byte_factor: float = setting(
        10.0,
        "Multiple of the predicted seconds that an engine may take to its first byte before the request is tried "
        "elsewhere; 0: no limit.",
    )
    first_byte_seconds_min: WallSeconds = setting(5.0, "Wall seconds that an engine may always take to its first byte.")
    chunk_timeout_seconds: WallSeconds = setting(
        60.0,
        "Wall seconds without a byte after which an answer that has begun is given up, unless its engine is known to work.",
        bounds=POSITIVE,
    )
    scheduler_timeout_seconds: WallSeconds = setting(
        3.0,
        "Wall seconds without an answer of a scheduler before the ingress places requests itself, by least load.",
        bounds=POSITIVE,
    )
    hold_seconds: WallSeconds = setting(
        30.0,
        "Wall seconds for which a request waits while there is no engine and no scheduler that would queue it.",
    )
    stream_usage: bool = setting(
        True,
        "Ask engines for the usage of every stream, to compare cached tokens. It is removed for clients that did not ask.",
    )
    forward_tenant: bool = setting(
        False,
        "Send the tenant to engines in `vllm_xargs`: for vLLM with Pointsman's DLPM scheduler. Other engines may refuse it.",
    )
    allow_field: tuple[str, ...] = setting(
        (),
        "Further body field that clients may send to engines, such as chat_template (docs/clients.md has the list). "
        "May be given several times.",
    )
    media_hosts: tuple[str, ...] = setting(
        (),
        "Host, or *.DOMAIN, from which engines may fetch the images, audio and video that a request names by URL; may be "
        "given several times. Without one, clients with keys may send data: URLs only and others any.",
        form=_MEDIA_HOST,
    )
    access_log: bool = setting(False, "Write one JSON line per request to standard output.")
    probe: bool = setting(True, "Check at each engine's start that its cache keys are those computed here.")

    @property
    def process_name(self) -> str:
        """In containers all have the same process id."""
        return self.name or f"ingress-{socket.gethostname()}-{os.getpid()}"

    @property
    def pool_names(self) -> list[PoolName]:
        return [PoolName(name) for name in dict.fromkeys(self.pools or (self.pool,))]

    @property
    def pool_tokenizers(self) -> dict[str, str]:
        """Directories by pool. Raises click.BadParameter."""
        directories = {}
        for given in self.pool_tokenizer:
            pool, equals, directory = given.partition("=")
            if not equals or pool not in self.pool_names:
                msg = f"'{given}' is not POOL=DIRECTORY with one of the pools {', '.join(self.pool_names)}"
                raise click.BadParameter(msg, param_hint="--pool-tokenizer")
            directories[pool] = directory
        return directories

    @property
    def trusts_clients(self) -> bool:
        """They are the operator's own: none needs a credential."""
        return not (self.require_keys or self.oidc_issuer)

    @override
    def check(self) -> None:
        _ = self.pool_tokenizers
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise click.UsageError("--tls-certificate and --tls-key need each other")
        if not self.oidc_issuer:
            if self.oidc_audience or self.oidc_jwks_url:
                raise click.UsageError(
                    "--oidc-audience and --oidc-jwks-url need --oidc-issuer: without it nobody is asked for a token"
                )
            return
        if not self.oidc_audience:
            raise click.UsageError(
                "--oidc-issuer needs --oidc-audience: tokens for other services must not be accepted here"
            )
        for url in filter(None, (self.oidc_issuer, self.oidc_jwks_url)):
            if not is_trustworthy(url):
                raise click.UsageError(f"{url} must be an https URL: whoever answers there decides who is admitted")


def is_trustworthy(url: str) -> bool:
    """Whether what is read there is the server's own: https, or this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
