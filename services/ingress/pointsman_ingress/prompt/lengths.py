"""What prompt and output may take of a model's context: refusals, and bounds for predictions and for what engines report."""

from dataclasses import dataclass

from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.primitives import Tokens
from pointsman_ingress.engine.usage import Usage
from pointsman_ingress.http.errors import context_too_long, output_too_long
from pointsman_ingress.prompt.parsed_request import Embeddings, ParsedRequest, SizedRequest
from pointsman_ingress.prompt.tokenization import PromptTokens

CONTEXT_TOKENS_MAX: Tokens = 2**32
"""Prompt and output, if the model's context is unknown."""
ESTIMATE_FACTOR_MAX = 16
"""By which the estimate of an input that is not tokenized may be too low."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """`model_len`: of the model's context; 0: unknown."""

    request: ParsedRequest
    model_len: Tokens

    def check(self, prompt_tokens: Tokens) -> None:
        """Of prompt and output together the engine decides: vLLM 0.32 gives what is left of the context, older ones
        refuse. Raises ApiError."""
        request, model_len = self.request, self.model_len
        if model_len == 0 or request.truncates:
            return
        output_tokens = self._demanded_tokens
        if output_tokens > model_len:
            raise output_too_long(output_tokens, model_len, param=request.output_field)
        if prompt_tokens + min(1, output_tokens) > model_len:
            raise context_too_long(prompt_tokens, model_len, param=request.prompt_field)

    def output_bound(self, prompt_tokens: Tokens) -> Tokens:
        """Of each answer; 0 if none is generated. `prompt_tokens`: of the shortest prompt. The engine truncates one that
        does not leave room, or it has fewer tokens than estimated."""
        request, model_len, room = self.request, self.model_len, OUTPUT_UNBOUNDED
        if model_len:
            room = model_len - prompt_tokens if prompt_tokens < model_len else model_len
        return room if request.output_tokens is None else min(request.output_tokens, room)

    def context_tokens(self, tokens: PromptTokens) -> Tokens:
        """That an instance must have room for. Inexact or truncated prompts may exceed every engine's context."""
        prompt_tokens = tokens.longest + tokens.estimated // len(tokens.prompts)
        return min(prompt_tokens + self._demanded_tokens, self.model_len or CONTEXT_TOKENS_MAX)

    def usage_max(self, tokens: PromptTokens) -> Usage:
        """The most that an engine may report: for each prompt and answer, the context where nothing closer is known."""
        request, model_len = self.request, self.model_len
        prompts = len(tokens.prompts)
        prompt_tokens = prompts * model_len if model_len else -1
        if isinstance(request.prompt, Embeddings):  # of trusted clients; how many prompts they are is unknown
            return Usage()
        if tokens.exact:
            prompt_tokens = tokens.count
        elif isinstance(request.prompt, SizedRequest):
            unsized = request.prompt.prompts_with_objects
            if not unsized:
                prompt_tokens = ESTIMATE_FACTOR_MAX * (tokens.count + 1)
            elif model_len:
                prompt_tokens = unsized * model_len
        answer_tokens = model_len or -1
        if request.output_demanded:
            answer_tokens = self.output_bound(tokens.shortest if tokens.exact else 0)
        return Usage(prompt_tokens, prompts * request.answers * answer_tokens if answer_tokens >= 0 else -1)

    @property
    def _demanded_tokens(self) -> Tokens:
        request = self.request
        return 1 if request.output_tokens is None or not request.output_demanded else request.output_tokens
