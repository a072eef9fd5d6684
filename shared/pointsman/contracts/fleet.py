"""Fleet events: instances, their load, and how far their caches are known. Subject `pm.<pool>.fleet.<instance>`.

Written by the worker (Joined, Reported, Left), an ingress (Probed) or the leader (the others). Fields: docs/events.md.
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
    """An engine answers and its worker follows its cache, in a new epoch. `cache`: `empty` (all events since the
    engine's start are known), `unknown`, or `no_events`."""

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
    """Cost of decoding; None: unknown."""
    transfer_tokens_per_s: Number = 0.0
    """How fast it fetches the KV cache of a prompt from another instance, alone; 0: not known, and taken for no time."""
    dp_rank: Rank = ANY_RANK
    """Which data-parallel rank of the engine at `url` this is: each has a cache of its own."""
    adapters: Annotated[list[Name], Listed] = []
    aliases: Annotated[list[Name], Listed] = []
    """Its further names now; InstanceReported has later ones."""
    completes: bool = True
    """Whether it completes prompts. One that makes vectors only is placed by load, and joins as `no_events`."""
    certain: bool = True
    """Whether missed engine events can be replayed. False without a replay socket, or once the engine contradicted its
    events: such a cache is never known exactly."""
    cache_detail: Text = ""
    """Why its contents are `unknown`; empty otherwise."""


class InstanceReported(FleetEvent, frozen=True, kw_only=True):
    """Once a second: the engine's load, and `blocks` and `digest` (xor of all keys) of its cache as of cache event
    `sequence`. `back_within`: the worker is being restarted and excused for so many seconds."""

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
    """Engine seconds of silence. Silence before `heard_since` does not count: the leader could not hear then."""

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
    """The instance fails requests or is far slower than others: nothing is placed there for `seconds`; running requests
    finish. `number`: ejections in a row. A new epoch starts un-ejected."""

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
