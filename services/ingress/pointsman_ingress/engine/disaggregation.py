"""Prefill/decode disaggregation in vLLM's protocol: the prefill request has `max_tokens` 1 and `kv_transfer_params` for
a remote decode; those of its answer go into the decode request. Requires one prompt and one answer."""

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
}  # as vLLM's proxies send it

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of")
"""irrelevant for the one token that prefill generates"""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_fields = msgspec.json.Decoder(dict[str, Any])
_answers = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """`cached_tokens`: of the prefill engine; None without a prefill, -1 if not reported."""

    transfer: dict[str, Any] | None
    cached_tokens: Tokens | None


NO_PREFILL = PrefillResult(None, None)


class SplitBody:
    def __init__(self, body: bytes, *, splittable: bool) -> None:
        self._body = body
        self._fields: dict[str, Any] = _fields.decode(body) if splittable else {}
        prompt = self._fields.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        self.possible = splittable and (self._fields.get("n") or 1) == 1 and not several  # one prompt, one answer

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
