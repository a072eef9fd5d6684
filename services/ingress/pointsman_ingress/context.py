"""Turns a `ParsedRequest` into a `RequestContext`. Refuses invalid requests before they are logged."""

from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.contracts.cache_salts import CacheSalts
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.primitives import ANSWERS_MAX, InstanceId, PoolName, SessionId, Tenant, Tokens
from pointsman.runtime import span_attributes
from pointsman.runtime.tenant_policies import FollowedPolicies
from pointsman_ingress import metrics
from pointsman_ingress.endpoints import AcceptedBody, Endpoint
from pointsman_ingress.engine.body_rewrites import add_tenant, ask_for_usage, impose_salt
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.engine.usage import Usage
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.http.errors import bad_request, context_too_long, output_too_long
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.priority import priority_of
from pointsman_ingress.http.request_headers import (
    ANONYMOUS,
    Headers,
    LatencySlo,
    cleaned,
    session_of,
    slo_of,
    tenant_of,
)
from pointsman_ingress.metrics import ModelMetrics
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.prompt.parsed_request import Embeddings, ParsedRequest, SizedRequest, TokenIds
from pointsman_ingress.prompt.tokenization import PromptTokens, TokenizeContext
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.work_threads import WorkThreads

CONTEXT_TOKENS_MAX: Tokens = 2**32  # prompt and output, if the model's context is unknown
SESSION_LENGTH_MAX = 256
INLINE_TOKENS_MAX: Tokens = 8_192  # the block keys of longer prompts are computed in a thread
ESTIMATE_FACTOR_MAX = 16  # by which the estimate of an input that is not tokenized may be too low


@dataclass(slots=True)
class RequestFacts:
    identity: Identity | None = None
    tenant: Tenant | None = None
    model: str | None = None
    pool: PoolName | None = None
    stream: bool = False
    prompt_tokens: Tokens | None = None
    instance: InstanceId | None = None
    retries: int = 0
    reason: str = ""
    light: bool = False
    """Whether its body may be worked on in the event loop."""

    def owner(self, call: HttpExchange) -> str:
        """Whose share of work threads, body memory and held requests it takes."""
        return self.tenant or call.client or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    endpoint: Endpoint
    pool: Pool
    command: RouteRequest
    owner: str  # of the work on its body (`WorkThreads`) and of its place in the `HoldQueue`
    headers: Headers
    body: bytes  # as sent to engines
    removes_usage: bool  # whether only the ingress asked for the stream's usage
    usage_max: Usage  # what engines may count for it; -1: unknown
    output_bounded: bool
    begins_late: bool  # a stream whose first output may come long after the first token
    comparable: bool  # whether reported cached tokens are comparable with the prediction
    prefix_header: str  # how much of the prompt has block keys
    dropped_fields: str = ""  # for a header: names of the client's fields that no engine gets
    model: str = ""  # as metrics name it
    prefix: PrefixPrompt | None = None  # for a fetch of its first tokens; None: nobody fetches, or they are not known
    private: bool = False  # whether the client learns nothing of the fleet

    @property
    def metrics(self) -> ModelMetrics:
        return metrics.of_model(self.pool.name, self.model)


async def find_model(
    call: HttpExchange, request: ParsedRequest, pools: Pools, facts: RequestFacts
) -> tuple[Pool, Model]:
    """Raises ApiError."""
    facts.model, facts.stream = cleaned(request.model) or None, request.stream
    owner = facts.owner(call)  # not by the tenant that a client without a key names
    if facts.identity is None:
        facts.tenant = tenant_of(call.headers, request.user)
    pool, model = await pools.await_model(request.model, facts.identity, owner=owner)
    facts.model, facts.pool = model.name, pool.name
    return pool, model


async def understand(
    call: HttpExchange,
    endpoint: Endpoint,
    accepted: AcceptedBody,
    pools: Pools,
    settings: IngressSettings,
    facts: RequestFacts,
    salts: CacheSalts | None,
    policies: FollowedPolicies,
    work: WorkThreads,
) -> RequestContext:
    """`salts`: None without authentication. Raises ApiError."""
    request, owner = accepted.request, facts.owner(call)
    slo = slo_of(call.headers, LatencySlo(settings.slo_ttft_seconds, settings.slo_tpot_seconds))
    pool, model = await find_model(call, request, pools, facts)
    model_len = pool.fleet.context_of(model)
    prompt = request.prompt
    check_length(request, model_len, max(map(len, prompt.prompts)) if isinstance(prompt, TokenIds) else 0)
    with call.span.child("tokenise") as span:
        tokens = await pool.tokenizer.tokens(
            request, TokenizeContext(call.headers, call.id, model, owner, facts.light, model_len, span)
        )
        if span.recording:
            span.set({span_attributes.INPUT_TOKENS: tokens.count, span_attributes.PREFIX: tokens.prefix_header})
    facts.prompt_tokens = tokens.count
    lengths = [len(prompt) for prompt in tokens.prompts] or [0]
    longest = max(lengths)
    if tokens.exact:
        check_length(request, model_len, longest)
    output_tokens = output_bound(request, model_len, min(lengths))
    tenant = facts.tenant or ANONYMOUS
    group, salt = "", request.cache_salt
    if salts is not None:
        group = salts.group(tenant)
        salt = salts.salt(group, request.cache_salt)
    few_tokens = len(tokens.keyed) <= INLINE_TOKENS_MAX
    keys = await work.run_unless(few_tokens, owner, _packed_keys, pool, model, tokens.keyed, salt)
    body = accepted.content
    if endpoint.parse is not None:
        imposed = salt if salts is not None else None
        body = await work.run_unless(facts.light, owner, _rewritten, accepted, settings, imposed, tenant)
    priority = priority_of(call.headers, request.service_tier, policies.of(tenant).priority)
    command = RouteRequest(
        request=call.id,
        ingress=settings.name,
        arrived_at=call.arrived_at,
        tenant=tenant,
        keys=keys,
        prompt_tokens=tokens.count,
        max_output_tokens=output_tokens,
        slo_ttft=slo.ttft,
        slo_tpot=slo.tpot,
        session=_session(call, request, facts),
        exact=tokens.exact,
        streaming=request.stream,
        adapter=model.adapter,
        alias=model.alias,
        # Inexact or truncated prompts may exceed every engine's context.
        context_tokens=min(
            longest + tokens.estimated // len(tokens.prompts) + _demanded_tokens(request),
            model_len or CONTEXT_TOKENS_MAX,
        ),
        followed=True,
        cache_group=group,
        client_request_id=call.client_request_id,
        priority=priority,
        answers=min(len(tokens.prompts) * request.answers, ANSWERS_MAX),
    )
    return RequestContext(
        endpoint=endpoint,
        pool=pool,
        command=command,
        owner=owner,
        headers=call.headers,
        body=body,
        removes_usage=_adds_usage(request, settings),
        usage_max=_usage_max(request, tokens, model_len),
        output_bounded=output_tokens < OUTPUT_UNBOUNDED,
        begins_late=request.begins_late,
        comparable=request.answers == 1 and len(tokens.prompts) == 1,
        prefix_header=tokens.prefix_header,
        dropped_fields=accepted.dropped,
        model=model.name,
        prefix=PrefixPrompt(request.model, tokens.prompts[0], salt)
        if pool.fleet.fetches and tokens.exact and longest
        else None,
        private=salts is not None,
    )


def _session(call: HttpExchange, request: ParsedRequest, facts: RequestFacts) -> SessionId:
    """Under the tenant's name where credentials are required, so that nobody names another's conversation."""
    session = session_of(call.headers, request.session)
    if facts.identity is None or not session:
        return session
    return SessionId(f"{facts.tenant}/{session}"[:SESSION_LENGTH_MAX])


def check_length(request: ParsedRequest, model_len: Tokens, prompt_tokens: Tokens) -> None:
    """Of prompt and output together the engine decides: vLLM 0.32 gives what is left of the context, older ones refuse."""
    if model_len == 0 or request.truncates:
        return
    output_tokens = _demanded_tokens(request)
    if output_tokens > model_len:
        raise output_too_long(output_tokens, model_len, param=request.output_field)
    if prompt_tokens + min(1, output_tokens) > model_len:
        raise context_too_long(prompt_tokens, model_len, param=request.prompt_field)


def _demanded_tokens(request: ParsedRequest) -> Tokens:
    return 1 if request.output_tokens is None or not request.output_demanded else request.output_tokens


def output_bound(request: ParsedRequest, model_len: Tokens, prompt_tokens: Tokens) -> Tokens:
    """Of each answer; 0 if none is generated. `prompt_tokens`: of the shortest prompt. The engine truncates one that does
    not leave room, or it has fewer tokens than estimated."""
    room = OUTPUT_UNBOUNDED
    if model_len:
        room = model_len - prompt_tokens if prompt_tokens < model_len else model_len
    return room if request.output_tokens is None else min(request.output_tokens, room)


def _usage_max(request: ParsedRequest, tokens: PromptTokens, model_len: Tokens) -> Usage:
    """For each prompt and answer, the context where nothing closer is known."""
    prompts, context = len(tokens.prompts), model_len or -1
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
    answer_tokens = context
    if request.output_demanded:
        answer_tokens = output_bound(request, model_len, min(map(len, tokens.prompts)) if tokens.exact else 0)
    return Usage(prompt_tokens, prompts * request.answers * answer_tokens if answer_tokens >= 0 else -1)


def _adds_usage(request: ParsedRequest, settings: IngressSettings) -> bool:
    return request.may_add_usage and settings.stream_usage


def _rewritten(accepted: AcceptedBody, settings: IngressSettings, salt: str | None, tenant: Tenant) -> bytes:
    """JSON as engines get it."""
    body = accepted.content
    if salt is not None:
        body = impose_salt(body, salt, replaces=accepted.salted)
    if settings.forward_tenant:
        body = add_tenant(body, tenant)
    return ask_for_usage(body) if _adds_usage(accepted.request, settings) else body


def _packed_keys(pool: Pool, model: Model, tokens: Sequence[int], cache_salt: str) -> bytes:
    try:
        return pool.block_keys.packed(model.base, tokens, lora=model.adapter, cache_salt=cache_salt)
    except ValueError as error:
        raise bad_request(f"{error}.", param="prompt") from error
