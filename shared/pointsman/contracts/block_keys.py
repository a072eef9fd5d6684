"""Block keys: keyed 64-bit BLAKE2b over the parent key and the block's tokens (little-endian u32 ids). The chain starts
from model, LoRA adapter, cache salt and a secret, so a leaked log reveals no prompt and prompts of different salts
never match. Ingress and worker compute the same keys; engine hashes stay in the worker."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import cast

from pointsman.primitives import KEYS_MAX, BlockKey, Tokens, from_little_endian, little_endian

KEY_BYTES = 8
TOKEN_BYTES = 4
SECRET_BYTES_MAX = 64


class KeyChain:
    def __init__(self, *, secret: bytes, model: str, block_tokens: Tokens) -> None:
        """`secret`: at most 64 bytes, the same in every ingress and worker."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        if len(secret) > SECRET_BYTES_MAX:
            raise ValueError(f"the secret has {len(secret)} bytes; at most {SECRET_BYTES_MAX} are allowed")
        self.block_tokens = block_tokens
        self._secret = secret
        self._model = model

    def root(self, *, lora: str = "", cache_salt: str = "") -> BlockKey:
        """Parent key of the first block of every prompt with this adapter and salt."""
        identity = "\x00".join(("pointsman-1", self._model, lora, cache_salt, str(self.block_tokens)))
        digest = blake2b(identity.encode(), key=self._secret, digest_size=KEY_BYTES).digest()
        return BlockKey(int.from_bytes(digest, "little"))

    def extend(self, parent: BlockKey, tokens: Sequence[int]) -> list[BlockKey]:
        """Keys of the whole blocks in `tokens`. Raises ValueError if a token id does not fit 32 bits."""
        try:
            data = little_endian("I", tokens)
        except (OverflowError, TypeError) as error:
            raise ValueError("token ids must be integers from 0 to 4294967295") from error
        width = self.block_tokens * TOKEN_BYTES
        secret = self._secret
        previous = parent.to_bytes(KEY_BYTES, "little")
        digests = []
        for start in range(0, len(data) - width + 1, width):
            previous = blake2b(previous + data[start : start + width], key=secret, digest_size=KEY_BYTES).digest()
            digests.append(previous)
        return unpack_keys(b"".join(digests))


def pack_keys(keys: Iterable[int]) -> bytes:
    return little_endian("Q", keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Raises ValueError if the length is not a multiple of 8."""
    return cast("list[BlockKey]", from_little_endian("Q", packed).tolist())


def find_packed(packed: bytes, sought: bytes, width: int = KEY_BYTES, start: int = 0) -> int:
    """Where it first begins at a multiple of `width` bytes, from `start` on, or -1: it may also be found across two others."""
    at = packed.find(sought, start)
    while at % width and at >= 0:
        at = packed.find(sought, at + 1)
    return at


def check_packed(packed: bytes) -> None:
    """Raises ValueError unless these are packed keys."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys have {len(packed)} bytes, no multiple of {KEY_BYTES}")


def check_key(key: int) -> None:
    """Raises ValueError if a key or digest exceeds 64 bits."""
    if key > KEYS_MAX:
        raise ValueError("a block key has at most 64 bits")
