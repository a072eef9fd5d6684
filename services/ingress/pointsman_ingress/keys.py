"""Block keys of prompts, chained with the fleet's secret: what the scheduler sees in place of tokens."""

from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.primitives import BlockKey, Tokens


class Keys:
    """One chain for each model, made when it is first asked for."""

    def __init__(self, *, secret: bytes, block_tokens: Tokens) -> None:
        """Both as in every process of the fleet. Raises ValueError where they are out of bounds."""
        self.block_tokens = block_tokens
        self._secret = secret
        self._chains: dict[str, KeyChain] = {}
        self._chain("")

    def packed(self, model: str, tokens: list[int], *, lora: str = "", cache_salt: str = "") -> bytes:
        """Keys of the prompt's whole blocks, as they cross the wire. Raises ValueError for impossible token ids."""
        return pack_keys(self._extended(model, tokens, lora, cache_salt))

    def last(self, model: str, tokens: list[int]) -> bytes:
        """The key of the last whole block, packed; empty where the prompt has none."""
        return pack_keys(self._extended(model, tokens, "", "")[-1:])

    def _extended(self, model: str, tokens: list[int], lora: str, cache_salt: str) -> list[BlockKey]:
        chain = self._chain(model)
        return chain.extend(chain.root(lora=lora, cache_salt=cache_salt), tokens)

    def _chain(self, model: str) -> KeyChain:
        chain = self._chains.get(model)
        if chain is None:
            chain = KeyChain(secret=self._secret, model=model, block_tokens=self.block_tokens)
            self._chains[model] = chain
        return chain
