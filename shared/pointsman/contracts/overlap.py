"""`cmd.overlap`: which instances hold how much of a prompt. For routers that are not of this deployment too, so the
structs refuse unknown fields: a misspelt one would look like an empty cache. Fields: docs/overlap.md."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from pointsman.contracts.block_keys import KEY_BYTES, check_packed
from pointsman.contracts.commands import Command
from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.primitives import (
    BlockTokens,
    Count,
    EngineSeconds,
    InstanceId,
    Listed,
    Name,
    PackedKeys,
    Rank,
    Sequence,
    Tenant,
    Term,
    Text,
    Tokens,
)

OVERLAP_BYTES_MAX = 1024 * 1024
OVERLAP_PROMPTS_MAX = 64
OVERLAP_TOKENS_MAX = 131_072
OVERLAP_KEYS_MAX = 65_536
"""Of all prompts of a request."""

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class OverlapRefusal(StrEnum):
    """Why a request was not answered. `too_often`: again after `retry_after`."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    TOO_OFTEN = "too_often"


class OverlapPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Token ids, or the keys of the whole blocks."""

    token_ids: Annotated[list[TokenId], Meta(max_length=OVERLAP_TOKENS_MAX)] = []
    block_keys: PackedKeys = b""

    def __post_init__(self) -> None:
        check_packed(self.block_keys)
        if self.token_ids and self.block_keys:
            raise ValueError("a prompt is given by `token_ids` or by `block_keys`, not by both")


class OverlapRequest(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`adapter`: name of a LoRA adapter. `cache_salt`: as engines got it; with `tenant`, what its client sent, from which
    the salt of the tenant follows as an ingress with credentials makes it."""

    prompts: Annotated[list[OverlapPrompt], Meta(min_length=1, max_length=OVERLAP_PROMPTS_MAX)]
    adapter: Name = ""
    tenant: Tenant = Tenant("")
    cache_salt: Name = ""

    def __post_init__(self) -> None:
        tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        keys = sum(len(prompt.block_keys) for prompt in self.prompts) // KEY_BYTES
        if tokens > OVERLAP_TOKENS_MAX or keys > OVERLAP_KEYS_MAX:
            raise ValueError(
                f"{tokens} token ids and {keys} keys are more than {OVERLAP_TOKENS_MAX} and {OVERLAP_KEYS_MAX}"
            )


class InstanceOverlap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`matched_blocks`, `matched_tokens`: by prompt, from its beginning without a gap. `knowledge_reason`: why they may be
    wrong; empty if `knowledge` is exact."""

    instance: InstanceId
    url: Name
    status: Name
    knowledge: Name
    matched_blocks: Annotated[list[Count], Meta(max_length=OVERLAP_PROMPTS_MAX)]
    matched_tokens: Annotated[list[Tokens], Meta(max_length=OVERLAP_PROMPTS_MAX)]
    knowledge_reason: Text = ""
    role: Role = "both"
    dp_rank: Rank = ANY_RANK


class OverlapAnswered(Command, frozen=True, kw_only=True):
    """Knowledge of one scheduler, from the log up to `as_of`. `behind`: entries that the log had beyond it, counted within
    the last second. `age`: wall seconds since the newest entry that changed anything."""

    pool: Name
    model: Name
    block_tokens: BlockTokens
    scheduler: Name
    leading: bool
    term: Term
    as_of: Sequence
    behind: Count
    age: EngineSeconds
    instances: Annotated[list[InstanceOverlap], Listed]


class OverlapRefused(Command, frozen=True, kw_only=True):
    """`reason` is an OverlapRefusal. `retry_after`: wall seconds."""

    reason: Text
    detail: Text
    retry_after: EngineSeconds = 0.0
