"""Prefill on one engine and decode on another: in, a request body; out, the bodies for both engines.

vLLM's protocol: the prefill engine gets the request with `max_tokens` 1 and `kv_transfer_params` that announce a remote
decode. Its answer says in its own `kv_transfer_params` where the KV cache is, or nothing if connectors find it by the
prompt. The decode engine gets the client's request with those parameters. Only completions and chats with one prompt and
one answer are split; of others the decode engine does all.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.engine.usage import usage_in

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's own proxies send it."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of")
"""Fields that only cost time if one token is generated that nobody reads."""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_fields = msgspec.json.Decoder(dict[str, Any])
_answers = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Where the KV cache is, and how much of the prompt the prefill engine had cached: None if there was no prefill, -1 if
    it did not say."""

    transfer: dict[str, Any] | None
    cached_tokens: Tokens | None


NO_PREFILL = PrefillResult(None, None)


class SplitBody:
    def __init__(self, body: bytes, *, splittable: bool) -> None:
        """`splittable`: whether engines can split requests on this path."""
        self._body = body
        self._fields: dict[str, Any] = _fields.decode(body) if splittable else {}
        prompt = self._fields.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        self.possible = splittable and (self._fields.get("n") or 1) == 1 and not several
        """Whether it has one prompt and asks for one answer."""

    def for_prefill(self) -> bytes:
        fields = {name: value for name, value in self._fields.items() if name not in NOT_FOR_PREFILL}
        fields |= {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return msgspec.json.encode(fields)

    def for_decode(self, prefill: PrefillResult) -> bytes:
        if not prefill.transfer:
            return self._body
        return msgspec.json.encode(self._fields | {"kv_transfer_params": prefill.transfer})


def read_prefill(answer: bytes) -> PrefillResult:
    try:
        transfer = _answers.decode(answer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        transfer = None
    return PrefillResult(transfer, usage_in(answer).cached_tokens)
