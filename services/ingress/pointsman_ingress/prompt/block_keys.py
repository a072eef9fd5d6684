"""Block keys of prompts, chained with the deployment's secret: takes token ids, returns packed keys."""

from collections.abc import Callable, Sequence

from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.primitives import BlockKey, Tokens


class BlockKeys:
    def __init__(self, *, secret: bytes, block_tokens: Callable[[], Tokens], proven: bool = True) -> None:
        """`block_tokens`: current tokens per key. `proven`: no probe has to show first that engines have the same keys. Raises
        ValueError if the secret's length is out of bounds."""
        self._secret = secret
        self._block_tokens = block_tokens
        self.proven = proven
        KeyChain(secret=secret, model="", block_tokens=1)

    @property
    def block_tokens(self) -> Tokens:
        return self._block_tokens()

    def packed(self, model: str, tokens: Sequence[int], *, lora: str = "", cache_salt: str = "") -> bytes:
        """Keys of whole blocks. Raises ValueError for invalid token ids."""
        return pack_keys(self._keys(model, tokens, lora, cache_salt))

    def last(self, model: str, tokens: Sequence[int], *, cache_salt: str = "") -> bytes:
        """Packed key of the last whole block; empty if there is none."""
        return pack_keys(self._keys(model, tokens, "", cache_salt)[-1:])

    def _keys(self, model: str, tokens: Sequence[int], lora: str, cache_salt: str) -> list[BlockKey]:
        chain = KeyChain(secret=self._secret, model=model, block_tokens=self._block_tokens())
        return chain.extend(chain.root(lora=lora, cache_salt=cache_salt), tokens)
