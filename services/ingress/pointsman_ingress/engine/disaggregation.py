"""Two engines for one request: one computes the prompt, another fetches its KV cache and gives the answer.

vLLM's protocol in two steps. The prefill engine gets the request with `max_tokens` 1 and `kv_transfer_params` that say
that somebody else will decode; its answer says, in `kv_transfer_params` of its own, where the KV cache can be fetched.
The decode engine gets the request as the client sent it, with those parameters. Connectors that find KV caches by the
prompt itself, as those over a shared storage do, answer without parameters, and then none are passed on.

Between the steps the leader is asked where the request goes on. Only completions and chats are split, and of those only
requests with one prompt and for one answer, since `kv_transfer_params` mean one sequence. Of others the decode engine
does all: then nothing is prefilled elsewhere, and the leader is told so.

The bodies are made here, without I/O; who sends them is the gateway.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.engine.proxy import usage_in

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells an engine that it only prefills. The empty ones are what vLLM's own proxies send too."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of")
"""What has no meaning, or only a price, where one token is generated that nobody reads."""

_fields = msgspec.json.Decoder(dict[str, Any])


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_answers = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the prefill engine said: where the KV cache is, and how much of the prompt it had. `cached_tokens` None where
    nothing was prefilled elsewhere, -1 where the engine did not say."""

    transfer: dict[str, Any] | None
    cached_tokens: Tokens | None


NOT_PREFILLED = Prefilled(None, None)


class SplitBody:
    """One request's body, for both of its engines."""

    def __init__(self, body: bytes, *, path_splits: bool) -> None:
        """`path_splits`: whether its path is one of those that engines can split."""
        self._body = body
        self._path_splits = path_splits
        self._asked: dict[str, Any] = _fields.decode(body) if path_splits else {}

    @property
    def possible(self) -> bool:
        """Whether it can be split: one prompt is asked for one answer."""
        if not self._path_splits:
            return False
        prompt = self._asked.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return (self._asked.get("n") or 1) == 1 and not several

    def prefill(self) -> bytes:
        """For the engine that computes the prompt."""
        asked = {name: value for name, value in self._asked.items() if name not in NOT_FOR_PREFILL}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        return msgspec.json.encode(asked)

    def decode(self, prefilled: Prefilled) -> bytes:
        """For the engine that answers."""
        if not prefilled.transfer:
            return self._body
        return msgspec.json.encode(self._asked | {"kv_transfer_params": prefilled.transfer})


def read_prefill(answer: bytes) -> Prefilled:
    """The answer of the engine that computed the prompt."""
    try:
        transfer = _answers.decode(answer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        transfer = None
    return Prefilled(transfer, usage_in(answer).cached_tokens)
