"""What a client may send to an engine: the body fields of each endpoint. Other fields are not passed on. Those by which
an engine is led elsewhere come from the ingress alone and are refused."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from pointsman_ingress.engine.body_rewrites import SALT_FIELD
from pointsman_ingress.http.errors import ApiError, bad_request
from pointsman_ingress.http.request_headers import cleaned

NULL = msgspec.Raw(b"null")
"""Of a field that is not sent, among those that are decoded later."""


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


OURS = _names(
    "kv_transfer_params ec_transfer_params do_remote_decode do_remote_prefill remote_engine_id remote_block_ids"
)
OURS |= _names(
    "remote_host remote_port bootstrap_host bootstrap_port bootstrap_room bootstrap_addr custom_logit_processor"
)
"""Refused from every client: they make an engine connect to a peer or run code."""

FOR_TRUSTED = _names("chat_template media_io_kwargs mm_processor_kwargs prompt_embeds priority vllm_xargs")
FOR_TRUSTED |= _names("previous_response_id previous_input_messages background data stream_interval")
FOR_TRUSTED |= _names("include_reasoning stream_reasoning")
"""Refused from clients with keys unless the operator allows them: they take a template, tensors, a place in the queue,
what the engine keeps of others, or hide tokens (several in an event, which is counted as one where a stream ends early)."""
HARMLESS = {"background": b"false", "priority": b"0", "include_reasoning": b"true", "stream_reasoning": b"true"}
"""Values of them that ask for nothing, as null does: the engines' defaults. Engines need not get them."""

_SAMPLING = _names(
    "temperature top_p top_k min_p seed stop n logit_bias frequency_penalty presence_penalty repetition_penalty",
    "length_penalty use_beam_search best_of early_stopping min_tokens ignore_eos stop_token_ids bad_words",
    "include_stop_str_in_output skip_special_tokens spaces_between_special_tokens allowed_token_ids logprob_token_ids",
    "prompt_logprobs truncate_prompt_tokens truncation_side add_special_tokens repetition_detection watermarking",
    "thinking_token_budget return_token_ids return_tokens_as_token_ids return_token_offsets return_prompt_text",
    "session_id",
)
_STRUCTURE = _names(
    "response_format structured_outputs structural_tag guided_json guided_regex guided_choice guided_grammar",
    "guided_decoding_backend guided_whitespace_pattern regex ebnf json_schema stop_regex no_stop_trim",
)
_COMMON = _names("model user stream stream_options max_tokens cache_salt metadata store service_tier safety_identifier")
_GENERATED = (
    _COMMON | _SAMPLING | _STRUCTURE | _names("echo logprobs top_logprobs prompt_cache_key prompt_cache_retention")
)
_TEMPLATE = _names("add_generation_prompt continue_final_message chat_template_kwargs documents")

COMPLETION = _GENERATED | _names("prompt suffix")
CHAT = (
    _GENERATED
    | _TEMPLATE
    | _names(
        "messages max_completion_tokens tools tool_choice parallel_tool_calls functions function_call modalities audio"
    )
    | _names("reasoning_effort separate_reasoning reasoning prediction verbosity")
    | _names("web_search_options")
)
RESPONSE = _GENERATED | _names(
    "input instructions max_output_tokens max_tool_calls tools tool_choice parallel_tool_calls reasoning text truncation",
    "include prompt conversation chat_template_kwargs enable_response_messages",
)
MESSAGES = _COMMON | _names(
    "messages system tools tool_choice thinking temperature top_k top_p stop_sequences output_config output_format",
    "chat_template_kwargs watermarking container context_management cache_control inference_geo speed betas",
)
COUNT_TOKENS = MESSAGES - {"cache_salt"}
_POOLED = _names(
    "model user input messages cache_salt truncate_prompt_tokens truncation_side padding add_special_tokens",
    "add_generation_prompt continue_final_message chat_template_kwargs encoding_format embed_dtype endianness dimensions",
    "use_activation activation softmax",
)
EMBEDDINGS = _POOLED
POOLED = _POOLED | {"task"}
PAIRS = _POOLED | _names(
    "query queries documents items text_1 text_2 data_1 data_2 top_n max_tokens_per_query max_tokens_per_doc instruction",
    "return_documents max_chunks_per_doc",
)
TOKENIZE = _TEMPLATE | _names("model prompt messages tools add_special_tokens return_token_strs")
DETOKENIZE = _names("model tokens skip_special_tokens")
AUDIO = _SAMPLING | _names(
    "file model language languages to_language prompt response_format timestamp_granularities include",
    "stream stream_include_usage stream_continuous_usage_stats max_completion_tokens hotwords keywords",
    "user chunking_strategy known_speaker_names known_speaker_references",
)
"""Lists and objects come as `NAME[]` and `NAME[KEY]`."""

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
TEMPLATE = "chat_template"
NOT_ARGUMENTS = frozenset({TEMPLATE, "tokenize"})
"""Of a template: these replace it, or how it is rendered (CVE-2025-61620, CVE-2025-62426). Refused where TEMPLATE is."""

DROPPED_SHOWN_MAX = 8
DROPPED_HEADER = b"x-pointsman-dropped-fields"
OUTLINED_BYTES_MIN = 4096


@dataclass(frozen=True, slots=True)
class CheckedFields:
    """`dropped`: names of fields that no engine gets. `salted`: the client sent `cache_salt`."""

    dropped: tuple[str, ...] = ()
    salted: bool = False

    @property
    def dropped_shown(self) -> str:
        """For a response header; empty if everything is passed on."""
        names = (cleaned(name) for name in self.dropped[:DROPPED_SHOWN_MAX])
        return ", ".join(name for name in names if name)


class FieldRules:
    def __init__(self, *, trusted: bool, allowed: Collection[str] = ()) -> None:
        """`trusted`: clients are the operator's own. `allowed`: further fields, by the operator."""
        self._further = frozenset(allowed) - OURS | (FOR_TRUSTED if trusted else frozenset())
        self._refused = (OURS | FOR_TRUSTED) - self._further
        self._decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

    def check(self, body: bytes, known: frozenset[str]) -> CheckedFields:
        """`body`: a valid JSON object. `known`: those of the endpoint. Raises ApiError."""
        fields = self._decode(_outline(body))
        salted = SALT_FIELD in fields
        if TEMPLATE_ARGUMENTS in fields and TEMPLATE in self._refused:
            self._check_arguments(bytes(fields[TEMPLATE_ARGUMENTS]))
        if fields.keys() <= known:
            return CheckedFields(salted=salted)
        foreign = tuple(name for name in fields if name not in known and name not in self._further)
        for name in foreign:
            if name in self._refused and bytes(fields[name]) not in (b"null", HARMLESS.get(name)):
                raise field_not_allowed(name)
        return CheckedFields(foreign, salted=salted)

    def _check_arguments(self, arguments: bytes) -> None:
        """Raises ApiError."""
        for name in NOT_ARGUMENTS & self._decode(arguments).keys() if arguments != b"null" else ():
            raise field_not_allowed(name)

    def check_form(self, names: Collection[str]) -> None:
        """A form goes to the engine as it came, so unknown fields are refused. Raises ApiError."""
        for name in names:
            field, _, _ = name.partition("[")
            if field not in AUDIO and field not in self._further:
                raise field_not_allowed(name)


def field_not_allowed(name: str) -> ApiError:
    shown = cleaned(name)
    return bad_request(f"The field `{shown}` may not be sent here.", param=shown, code="field_not_allowed")


def _outline(body: bytes) -> bytes:
    """The body without a long list of token ids, which costs most of the time. A run without quotes, brackets and
    backslashes can be cut anywhere without a change of the field names."""
    if len(body) < OUTLINED_BYTES_MIN:
        return body
    name = body.find(b'"prompt"')
    start = body.find(b"[", name)
    end = body.find(b"]", start)
    if min(name, start, end) < 0:
        return body
    run = body[start + 1 : end]
    plain = not any(mark in run for mark in (b'"', b"[", b"{", b"\\"))
    return body[: start + 1] + body[end:] if plain else body
