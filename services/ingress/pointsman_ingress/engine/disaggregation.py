"""Prefill/decode disaggregation in vLLM's protocol: the prefill request has `max_tokens` 1 and `kv_transfer_params` for
a remote decode; those of its answer go into the decode request. Requires one prompt and one answer."""

from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.engine.usage import try_decode, usage_in
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.json_form import check_form

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}  # as vLLM's proxies send it

NOT_FOR_PREFILL = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of")
"""Fields without effect on the one token that the prefill engine generates."""

TRANSFER_BYTES_MAX = 1024 * 1024
"""Of an engine's `kv_transfer_params`. They list the blocks of the prompt: half of that for a million tokens at 16 a block."""

NO_TRANSFER = "gave no kv_transfer_params that can be used: has it a connector?"

ONE_ANSWER = (b"1", b"null")
"""Values of `n`. Fields stay undecoded: engines take numbers that Python's decoder does not."""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answers = msgspec.json.Decoder(_PrefillAnswer)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """`transfer`: the engine's `kv_transfer_params`, as it wrote their values; None if it gave none that can be used.
    `cached_tokens`: of the prefill engine; None without a prefill, -1 if not reported."""

    transfer: dict[str, msgspec.Raw] | None
    cached_tokens: Tokens | None


NO_PREFILL = PrefillResult(None, None)


class SplitBody:
    def __init__(self, body: bytes, *, splittable: bool) -> None:
        self._body = body
        self._fields: dict[str, Any] = dict(_fields.decode(body)) if splittable else {}
        one_answer = bytes(self._fields.get("n", b"1")) in ONE_ANSWER
        self.possible = splittable and one_answer and not _several(bytes(self._fields.get("prompt", b"")))

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


def _several(prompt: bytes) -> bool:
    """Whether it is a list of anything but token ids."""
    inside = prompt[1:].lstrip()[:1] if prompt.startswith(b"[") else b""
    return inside not in b"]-0123456789"


def read_prefill(answer: bytes) -> PrefillResult:
    """Work for a thread unless the answer is short."""
    decoded = try_decode(_answers, answer)
    transfer = _transfer_in(bytes(decoded.kv_transfer_params)) if decoded else None
    return PrefillResult(transfer, usage_in(answer).cached_tokens)


def _transfer_in(parameters: bytes) -> dict[str, msgspec.Raw] | None:
    if len(parameters) > TRANSFER_BYTES_MAX:
        return None
    try:
        check_form(parameters)
    except ApiError:
        return None
    return try_decode(_fields, parameters)
