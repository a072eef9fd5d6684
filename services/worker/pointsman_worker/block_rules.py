"""Key-related rules of vLLM's block events: tier, attention group, adapter, salt, and blocks keyed by tokens alone."""

from dataclasses import dataclass
from typing import Any

from pointsman.adapters.kv_events.events import EngineBlockStored
from pointsman.contracts.cache import SlowerTier, Tier
from pointsman.primitives import Tokens

DEVICE_MEDIUM = "GPU"
TIER_OF_MEDIUM: dict[str, SlowerTier] = {"CPU": "host", "STORAGE": "storage", "DISK": "storage", "EXTERNAL": "external"}
"""vLLM's media, and LMCache's names for them."""
REMOTE = "REMOTE"
FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


def on_device(medium: str | None) -> bool:
    return medium is None or medium.upper() == DEVICE_MEDIUM


def tier_of(medium: str | None, locality: str | None, *, shared_store: bool) -> Tier | None:
    """None for an unknown medium. `shared_store`: what is not on the device is in a store that all engines share."""
    if on_device(medium):
        return "device"
    tier = TIER_OF_MEDIUM.get((medium or "").upper())
    return "external" if tier is not None and (shared_store or locality == REMOTE) else tier


@dataclass(slots=True)
class AttentionGroups:
    """`chosen`: first full-attention group, represents all. `several`: others share the capacity."""

    chosen: int | None = None
    several: bool = False

    def counts(self, event: EngineBlockStored) -> bool:
        if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in FULL_ATTENTION_KINDS:
            self.several = True
            return False
        if event.group_idx is not None and self.chosen is None:
            self.chosen = event.group_idx
        ours = event.group_idx in (None, self.chosen)
        self.several = self.several or not ours
        return ours


def lora_of(event: EngineBlockStored) -> str:
    """Older engines give only a number."""
    if event.lora_name:
        return event.lora_name
    return "" if event.lora_id is None else str(event.lora_id)


def salt_of(event: EngineBlockStored) -> str:
    """What remains of the first block's extra keys after the adapter."""
    extra = event.extra_keys[0] if event.extra_keys else None
    rest = _beyond_lora(event, extra or [])
    return str(rest[0]) if rest else ""


def token_keyed_blocks(event: EngineBlockStored) -> int:
    """Leading blocks keyed only by tokens, adapter and, at a prompt's start, a salt."""
    starts_prompt = event.parent_block_hash is None
    for index, extra in enumerate(event.extra_keys or ()):
        if not extra:
            continue
        rest = _beyond_lora(event, extra)
        salt_only = starts_prompt and index == 0 and len(rest) == 1 and isinstance(rest[0], str)
        if rest and not salt_only:
            return min(index, len(event.block_hashes))
    return len(event.block_hashes)


def layout_error(event: EngineBlockStored, block_tokens: Tokens) -> str:
    """Empty if block size and token count match the engine's block size."""
    if event.block_size != block_tokens:
        return (
            f"the engine's events have blocks of {event.block_size} tokens, its /metrics say {block_tokens}: "
            f"set --engine-block-tokens {event.block_size}"
        )
    if len(event.token_ids) != event.block_size * len(event.block_hashes):
        return f"a store of {len(event.block_hashes)} blocks of {event.block_size} tokens has {len(event.token_ids)} tokens"
    return ""


def _beyond_lora(event: EngineBlockStored, extra: list[Any]) -> list[Any]:
    return extra[1:] if event.lora_name and extra[:1] == [event.lora_name] else extra
