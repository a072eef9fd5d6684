"""Fleet events: who is there, how loaded, and how far it can be trusted.

Subject `pm.<pool>.fleet.<instance>`. Joined, Reported and Left are written by the worker, Probed by an ingress,
Suspected, Draining, Undrained, Ejected and Unejected by the leader.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.block_keys import check_key
from pointsman.contracts.envelope import Event
from pointsman.primitives import (
    SPEED_MIN,
    BlockTokens,
    Coefficient,
    Count,
    Digest,
    Epoch,
    InstanceId,
    Listed,
    Moment,
    Name,
    Number,
    Rank,
    Seconds,
    Sequence,
    Text,
    Tokens,
)


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to prefill tokens `cached..total` of a prompt, alone on the engine:

    `fixed_s + max(floor_s, per_token_s * (total - cached) + per_token_squared_s * (total^2 - cached^2))`

    (Mooncake, FAST'25, Eq. 1: linear layers grow with n, attention with n squared. The floor is what reading the
    weights once takes, however few tokens there are.)
    """

    fixed_s: Coefficient
    per_token_s: Coefficient
    per_token_squared_s: Coefficient
    floor_s: Coefficient = 0.0


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one decode step, in which each request that decodes gets a token:

    `step_s + per_request_s * requests + per_context_token_s * (tokens in the KV caches of all of them)`

    (The weights are read once a step, each request's KV cache too.)
    """

    step_s: Coefficient
    per_request_s: Coefficient = 0.0
    per_context_token_s: Coefficient = 0.0


Role = Literal["both", "prefill", "decode"]
"""What an instance does of a request: all of it, its prompt only, or its answer only, from a KV cache that it fetches."""


ANY_RANK = -1
"""In place of a data-parallel rank: the engine has one, or chooses itself."""


class FleetEvent(Event, frozen=True, kw_only=True):
    instance: InstanceId
    epoch: Epoch


class InstanceJoined(FleetEvent, frozen=True, kw_only=True):
    """An engine answers and its worker follows its cache. A new epoch starts with an empty cache.

    `cache` says what the worker knows of the contents at this moment: `empty` (events since the engine's
    start, none missing), `unknown` (the engine may hold more than was seen), or `no_events`.
    """

    url: Name
    model: Name
    block_tokens: BlockTokens
    engine_block_tokens: BlockTokens
    kv_capacity_tokens: Tokens
    max_model_len: Tokens
    prefill: PrefillCost
    speed: Annotated[float, Meta(ge=SPEED_MIN, le=1e6)] = 1.0
    engine_version: Name = ""
    cache: Literal["empty", "unknown", "no_events"] = "empty"
    role: Role = "both"
    decode: DecodeCost | None = None
    """What decoding costs there; None where nobody said."""
    transfer_tokens_per_s: Number = 0.0
    """How fast it fetches the KV cache of a prompt from another instance, alone; 0: not known, and taken for no time."""
    dp_rank: Rank = ANY_RANK
    """Which data-parallel rank of the engine at `url` this is: each has a cache of its own."""
    adapters: Annotated[list[Name], Listed] = []
    aliases: Annotated[list[Name], Listed] = []
    """Its further names as of now, as InstanceReported tells them from then on."""
    completes: bool = True
    """Whether it completes prompts. One that makes vectors only is placed by load, and joins as `no_events`."""
    certain: bool = True
    """Whether every event of the engine that was missed can be had again. False without a replay socket, or once the engine
    has contradicted its own events: such a cache is never known exactly."""
    cache_detail: Text = ""
    """Why its contents are `unknown`; empty otherwise."""


class InstanceReported(FleetEvent, frozen=True, kw_only=True):
    """Once a second: load as the engine reports it, and what its cache should contain.

    `blocks` and `digest` (xor of all keys held) hold as of cache event `sequence` of this epoch. `adapters` (LoRA) and
    `aliases` are further names under which the engine takes requests at the moment; an adapter changes what the model
    computes, and so the keys, an alias does not. `certain` as in InstanceJoined, as of now: false while the replay socket does
    not answer. `back_within`, where it is not 0, is of a worker's last report before it is restarted: for so many seconds its
    silence is no reason to suspect the instance.
    """

    serving: bool
    waiting: Count
    running: Count
    kv_usage: Number
    sequence: Sequence
    blocks: Count
    digest: Digest
    undecodable: Count = 0
    adapters: Annotated[list[Name], Listed] = []
    aliases: Annotated[list[Name], Listed] = []
    certain: bool = True
    back_within: Seconds = 0.0

    def __post_init__(self) -> None:
        check_key(self.digest)


class InstanceProbed(FleetEvent, frozen=True, kw_only=True):
    """An ingress compared the keys it computes for a prompt with those from the engine's events."""

    parity: bool
    detail: Text = ""


class LivenessTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long the leader bears with silent workers, engine seconds. `heard_since`: silence before that moment does
    not count, since the leader was not there to hear."""

    heard_since: Moment
    suspect_after: Seconds
    leave_after: Seconds


class InstanceSuspected(FleetEvent, frozen=True, kw_only=True):
    """The leader has not heard from the worker for a while: nothing new is placed there."""

    silent_seconds: Seconds
    patience: LivenessTimeouts | None = None


class InstanceDraining(FleetEvent, frozen=True, kw_only=True):
    """Nothing new is placed there; what runs, finishes. `leaving`: a scaler will stop it as soon as it is idle."""

    reason: Text = ""
    leaving: bool = False


class InstanceUndrained(FleetEvent, frozen=True, kw_only=True):
    """Draining was called off."""


EjectionCause = Literal["consecutive_failures", "failure_share", "success_rate", "latency", "failed_probe"]
"""What made an instance an outlier (`policies.outliers`)."""


class InstanceEjected(FleetEvent, frozen=True, kw_only=True):
    """It fails requests, or is far slower than the others: nothing new is placed there for so many engine seconds; what runs,
    finishes. `detail` is the evidence; `number`: ejections in a row, this one counted. A new epoch begins un-ejected."""

    cause: EjectionCause
    detail: Text
    seconds: Seconds
    number: Count


class InstanceUnejected(FleetEvent, frozen=True, kw_only=True):
    """Its ejection is over. `half_open`: one request at a time may try it; without: it has proved well and is whole again."""

    half_open: bool


class InstanceLeft(FleetEvent, frozen=True, kw_only=True):
    """The instance is gone and its cache with it. `patience` where the leader let go of it for its silence."""

    reason: Text
    patience: LivenessTimeouts | None = None
