"""Key-related rules of vLLM's block events: tier, attention group, adapter, salt, and blocks keyed by tokens alone."""

from dataclasses import dataclass

import msgspec

from pointsman.adapters.kv_events.events import EngineBlockStored
from pointsman.contracts.cache import SlowerTier, Tier
from pointsman.primitives import Tokens

DEVICE_MEDIUM = "GPU"
TIER_OF_MEDIUM: dict[str, SlowerTier] = {"CPU": "host", "STORAGE": "storage", "DISK": "storage", "EXTERNAL": "external"}
"""vLLM's media, and LMCache's names for them."""
REMOTE = "REMOTE"
FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_NO_EXTRA_KEYS = (msgspec.Raw(b"\xc0"), msgspec.Raw(b"\x90"))
"""nil, and an empty array."""
_ABSENT = msgspec.Raw()


class _ExtraKeys(msgspec.Struct, array_like=True):
    """The first values of a block's entry: adapter, salt, and whether there are more. The others are skipped."""

    first: msgspec.Raw = _ABSENT
    second: msgspec.Raw = _ABSENT
    third: msgspec.Raw = _ABSENT


_extra_keys = msgspec.msgpack.Decoder(_ExtraKeys)
_text = msgspec.msgpack.Decoder(str)


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
    rest = _beyond_lora(event, event.extra_keys[0]) if event.extra_keys else []
    return (rest[0] or "") if rest else ""


def token_keyed_blocks(event: EngineBlockStored) -> int:
    """Leading blocks keyed only by tokens, adapter and, at a prompt's start, a salt."""
    starts_prompt = event.parent_block_hash is None
    for index, extra in enumerate(event.extra_keys or ()):
        if extra in _NO_EXTRA_KEYS:
            continue
        rest = _beyond_lora(event, extra)
        salt_only = starts_prompt and index == 0 and len(rest) == 1 and rest[0] is not None
        if rest and not salt_only:
            return min(index, len(event.block_hashes))
    return len(event.block_hashes)


def layout_error(event: EngineBlockStored, block_tokens: Tokens) -> str:
    """Empty if block size, token count and extra keys match the blocks."""
    if event.block_size != block_tokens:
        return (
            f"the engine's events have blocks of {event.block_size} tokens, its /metrics say {block_tokens}: "
            f"set --engine-block-tokens {event.block_size}"
        )
    if len(event.token_ids) != event.block_size * len(event.block_hashes):
        return f"a store of {len(event.block_hashes)} blocks of {event.block_size} tokens has {len(event.token_ids)} tokens"
    if event.extra_keys and len(event.extra_keys) != len(event.block_hashes):
        return f"a store of {len(event.block_hashes)} blocks has extra keys of {len(event.extra_keys)}"
    return ""


def _beyond_lora(event: EngineBlockStored, extra: msgspec.Raw) -> list[str | None]:
    """At most three values; None for one that is no text."""
    try:
        keys = _extra_keys.decode(extra)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return [None]
    values = [_text_of(value) for value in (keys.first, keys.second, keys.third) if value != _ABSENT]
    return values[1:] if event.lora_name and values[:1] == [event.lora_name] else values


def _text_of(value: msgspec.Raw) -> str | None:
    try:
        return _text.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
