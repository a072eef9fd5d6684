"""What an ingress can be told. See `chassis.settings` for how flags, environment and file combine."""

from dataclasses import dataclass

import click

from pointsman.runtime.processes import PROCESSES_MAX
from pointsman.runtime.settings import (
    COUNT,
    NOT_NEGATIVE,
    PORT,
    POSITIVE,
    DeploymentSettings,
    PoolNameType,
    ProcessSettings,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class IngressSettings(DeploymentSettings, ProcessSettings):
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", bounds=PORT)
    name: str = setting("", "Name of this ingress in the log; by default ingress-PID.")
    processes: int = setting(
        1,
        "Processes that share the port, about one for each core to be used. Each is an ingress of its own, NAME-1, NAME-2, ...; "
        "/metrics of any tells of all.",
        bounds=click.IntRange(1, PROCESSES_MAX),
    )
    pools: tuple[str, ...] = setting(
        (),
        "Pools to serve on this address, a model each; may be given several times. Default: the one of --pool.",
        bounds=PoolNameType(),
    )
    tokenizer: str = setting(
        "",
        "Directory with the model's tokenizer.json (and chat template), or 'builtin'. "
        "Without one the engines' /tokenize is asked, which costs a round trip.",
    )
    pool_tokenizer: tuple[str, ...] = setting(
        (),
        "POOL=DIRECTORY: the tokenizer of one of several pools, in place of --tokenizer. May be given several times.",
    )
    keys_file: str = setting(
        "",
        "File of API keys, one `NAME SHA256-HEX` a line. Without it everybody is let in. Read again when it changes.",
    )
    engine_api_key: str = setting("", "Key to show to the engines, where they ask for one.", secret=True)
    slo_ttft: float = setting(5.0, "Objective on time to first token where the client names none, engine seconds.")
    slo_tpot: float = setting(0.1, "Objective on time between tokens where the client names none, engine seconds.")
    body_bytes_max: int = setting(8 * 1024 * 1024, "Largest body that is read; above it the answer is 413.")
    request_timeout: float = setting(600.0, "Wall seconds after which a request is given up with 408.")
    body_timeout: float = setting(30.0, "Wall seconds that a client may take to send its body.")
    keep_alive_seconds: int = setting(
        75, "Wall seconds that an idle connection of a client is kept; longer than balancers keep theirs.", bounds=COUNT
    )
    retries_max: int = setting(2, "How often a request goes to another engine when one fails before its first byte.")
    lame_duck_seconds: float = setting(
        5.0,
        "Wall seconds after SIGTERM during which it still accepts requests, while /readyz answers 503 and each answer says "
        "connection: close. As long as balancers need to notice.",
        bounds=NOT_NEGATIVE,
    )
    drain_seconds_max: float = setting(
        600.0,
        "Wall seconds that requests under way may take to finish after that; what is left then is cut, with an error event.",
        bounds=NOT_NEGATIVE,
    )
    retry_budget: float = setting(
        0.6,
        "Share of a pool's live requests in this ingress that may be on a further attempt at once; others get 503.",
        bounds=NOT_NEGATIVE,
    )
    retry_budget_min: int = setting(10, "Requests that may be on a further attempt in any case.")
    connect_timeout: float = setting(2.0, "Wall seconds to reach an engine before it counts as failed.")
    first_byte_factor: float = setting(
        10.0,
        "How many times the predicted seconds an engine may take to its first byte before the request is tried elsewhere; "
        "0: any time.",
        bounds=NOT_NEGATIVE,
    )
    first_byte_min: float = setting(5.0, "Wall seconds that it may take in any case.")
    chunk_timeout: float = setting(
        60.0, "Wall seconds without a byte after which an answer that has begun is given up.", bounds=POSITIVE
    )
    silence_max: float = setting(
        3.0, "Wall seconds without any sign of a scheduler before the ingress places requests itself, by least load."
    )
    hold_seconds: float = setting(
        30.0,
        "Wall seconds for which a request waits here where there is no engine to ask and no scheduler that would hold it: "
        "no engine has joined yet, or nobody leads and none is ready.",
        bounds=NOT_NEGATIVE,
    )
    hold_max: int = setting(1_000, "Requests that may wait so.")
    connections_max: int = setting(4096, "Open connections to engines, all together.")
    tokenise_threads: int = setting(2, "Threads that tokenise long prompts.")
    stream_usage: bool = setting(
        True,
        "Ask engines for the usage of every stream, so that cached tokens can be compared. Clients that did not ask "
        "do not see it.",
    )
    names_clients: bool = setting(
        False,
        "Tell engines whose request it is, in `vllm_xargs`: for vLLM with Pointsman's DLPM scheduler. Engines that are "
        "not vLLM may refuse it.",
    )
    access_log: bool = setting(
        False, "Write one JSON line to standard output for each request: who asked for what, and what became of it."
    )
    probe: bool = setting(True, "Check at each engine's start that its cache keys are those computed here.")
