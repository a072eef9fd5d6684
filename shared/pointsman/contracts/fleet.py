"""Fleet events: instances, their load and cache knowledge. Subject `pm.<pool>.fleet.<instance>`. Written by the worker
(Joined, Reported, Left), an ingress (Probed) or the leader. Fields: docs/events.md."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.block_keys import check_key
from pointsman.contracts.cache import SlowerTier
from pointsman.contracts.envelope import Event
from pointsman.primitives import (
    SPEED_MIN,
    BlockTokens,
    Coefficient,
    Count,
    Digest,
    EngineSeconds,
    Epoch,
    InstanceId,
    Listed,
    Moment,
    Name,
    Number,
    Rank,
    Sequence,
    Text,
    Tokens,
)


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to prefill tokens `cached..total` of a prompt, alone on the engine (Mooncake, FAST'25, Eq. 1):

    `fixed_s + max(floor_s, per_token_s * (total - cached) + per_token_squared_s * (total^2 - cached^2))`

    The floor is the time to read the weights once.
    """

    fixed_s: Coefficient
    per_token_s: Coefficient
    per_token_squared_s: Coefficient
    floor_s: Coefficient = 0.0

    def seconds(self, total: Tokens, cached: Tokens) -> EngineSeconds:
        computed = self.per_token_s * (total - cached) + self.per_token_squared_s * (total * total - cached * cached)
        return self.fixed_s + max(self.floor_s, computed)


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one decode step: `step_s + per_request_s * requests + per_context_token_s * (tokens in all their KV
    caches)`."""

    step_s: Coefficient
    per_request_s: Coefficient = 0.0
    per_context_token_s: Coefficient = 0.0


Role = Literal["both", "prefill", "decode"]
"""`prefill` computes prompts only; `decode` generates from a KV cache that it fetches."""


ANY_RANK = -1
"""The engine has one data-parallel rank, or chooses itself."""


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
    transfer_tokens_per_s: Number = 0.0
    """Speed of fetching a KV cache, alone; 0: unknown, taken as instantaneous."""
    dp_rank: Rank = ANY_RANK
    adapters: Annotated[list[Name], Listed] = []
    aliases: Annotated[list[Name], Listed] = []
    completes: bool = True
    """False for embedding models: placed by load, joins as `no_events`."""
    certain: bool = True
    """Whether missed engine events can be replayed, and were. False without a replay socket, while the engine's past is
    being read, or once the engine contradicted its events."""
    cache_detail: Text = ""
    role_switching: bool = False
    """The engine can take any role, so a leader may change it."""
    fetches: bool = False
    """Its connector fetches prefixes from other instances, and gives its own (`kv_transfer_params`)."""
    shared_store: bool = False
    """It loads from and stores into the store that the pool's engines share (tier `external`)."""


class TierDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Count and digest of what the instance holds in one slower tier."""

    tier: SlowerTier
    blocks: Count
    digest: Digest

    def __post_init__(self) -> None:
        check_key(self.digest)


class InstanceReported(FleetEvent, frozen=True, kw_only=True):
    """Load, and count and digest (xor of all keys) of its cache as of cache event `sequence`; `tiers`: of its slower
    tiers. `back_within`: the worker restarts and is excused for so many seconds. Told to the leader once a second
    (NoteHeartbeat), and logged when the leader wants it or does not answer."""

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
    back_within: EngineSeconds = 0.0
    tiers: Annotated[list[TierDigest], Meta(max_length=3)] = []

    def __post_init__(self) -> None:
        check_key(self.digest)


class InstanceProbed(FleetEvent, frozen=True, kw_only=True):
    """An ingress compared its keys of a prompt with those of the engine's events."""

    parity: bool
    detail: Text = ""


class LivenessTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Engine seconds. Silence before `heard_since` does not count: the leader received nothing, or then came the
    instance's last heartbeat."""

    heard_since: Moment
    suspect_after: EngineSeconds
    leave_after: EngineSeconds


class InstanceSuspected(FleetEvent, frozen=True, kw_only=True):
    silent_seconds: EngineSeconds
    patience: LivenessTimeouts | None = None


class InstanceDraining(FleetEvent, frozen=True, kw_only=True):
    """Nothing new is placed there; running requests finish. `leaving`: a scaler will stop it once idle. `becomes`: the
    role that it takes then. `by`: the operator or scaler."""

    reason: Text = ""
    leaving: bool = False
    by: Name = ""
    becomes: Role | Literal[""] = ""


class InstanceUndrained(FleetEvent, frozen=True, kw_only=True):
    by: Name = ""


class InstanceRoleChanged(FleetEvent, frozen=True, kw_only=True):
    """Its drain is over and it serves in another role, with its cache. Holds until InstanceLeft, or until its worker
    announces another role than before. `left`: requests of the old role that it still has."""

    role: Role
    left: Count = 0


EjectionCause = Literal["consecutive_failures", "failure_share", "success_rate", "latency", "failed_probe"]


class InstanceEjected(FleetEvent, frozen=True, kw_only=True):
    """An outlier: nothing is placed there for `seconds`; running requests finish. `number`: ejections in a row. A new
    epoch starts un-ejected."""

    cause: EjectionCause
    detail: Text
    seconds: EngineSeconds
    number: Count


class InstanceUnejected(FleetEvent, frozen=True, kw_only=True):
    """`half_open`: takes one request at a time; otherwise fully restored."""

    half_open: bool


class InstanceLeft(FleetEvent, frozen=True, kw_only=True):
    """The instance and its cache are gone. `patience`: set if the leader removed it for its silence. `refused`: the
    leader removed it for its URL."""

    reason: Text
    patience: LivenessTimeouts | None = None
    refused: bool = False


AnyFleetEvent = (
    InstanceJoined
    | InstanceReported
    | InstanceProbed
    | InstanceSuspected
    | InstanceDraining
    | InstanceUndrained
    | InstanceRoleChanged
    | InstanceEjected
    | InstanceUnejected
    | InstanceLeft
)
