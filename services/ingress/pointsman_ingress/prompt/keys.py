"""Block keys of prompts, chained with the fleet's secret: what the scheduler sees in place of tokens."""

from collections.abc import Callable, Sequence

from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.primitives import BlockKey, Tokens


class Keys:
    """The keys of one pool: a chain for each model, made when it is first asked for."""

    def __init__(self, *, secret: bytes, block_tokens: Callable[[], Tokens]) -> None:
        """`secret` as in every process of the fleet; `block_tokens` tells what a key of the pool stands for at the moment,
        at least 1 once anything is asked for. Raises ValueError where the secret is out of bounds."""
        self._secret = secret
        self._block_tokens = block_tokens
        self._chains: dict[tuple[str, Tokens], KeyChain] = {}
        KeyChain(secret=secret, model="", block_tokens=1)

    @property
    def block_tokens(self) -> Tokens:
        return self._block_tokens()

    def packed(self, model: str, tokens: Sequence[int], *, lora: str = "", cache_salt: str = "") -> bytes:
        """Keys of the prompt's whole blocks, as they cross the wire. Raises ValueError for impossible token ids."""
        return pack_keys(self._extended(model, tokens, lora, cache_salt))

    def last(self, model: str, tokens: Sequence[int]) -> bytes:
        """The key of the last whole block, packed; empty where the prompt has none."""
        return pack_keys(self._extended(model, tokens, "", "")[-1:])

    def _extended(self, model: str, tokens: Sequence[int], lora: str, cache_salt: str) -> list[BlockKey]:
        chain = self._chain(model, self._block_tokens())
        return chain.extend(chain.root(lora=lora, cache_salt=cache_salt), tokens)

    def _chain(self, model: str, block_tokens: Tokens) -> KeyChain:
        chain = self._chains.get((model, block_tokens))
        if chain is None:
            chain = KeyChain(secret=self._secret, model=model, block_tokens=block_tokens)
            self._chains[model, block_tokens] = chain
        return chain
