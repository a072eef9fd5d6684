"""Turns the body of a request into a `RequestContext`: its pool and model, tokens, block keys, the body as engines get it, and
the command that asks for a place. Refuses invalid requests before they are logged."""

from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.primitives import ANSWERS_MAX, SessionId, Tenant, Tokens
from pointsman.runtime import span_attributes
from pointsman_ingress.context import RequestContext
from pointsman_ingress.endpoints import AcceptedBody, BodyRules, Endpoint
from pointsman_ingress.engine.body_rewrites import add_tenant, ask_for_usage, impose_salt
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.http.call import BodyLoan, HttpExchange
from pointsman_ingress.http.errors import bad_request
from pointsman_ingress.http.request_headers import (
    ANONYMOUS,
    LatencySlo,
    cleaned,
    priority_of,
    session_of,
    slo_of,
    tenant_of,
)
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.prompt.lengths import RequestLengths
from pointsman_ingress.prompt.parsed_request import ParsedRequest, TokenIds
from pointsman_ingress.prompt.tokenization import PromptTokens, TokenizeContext

SESSION_LENGTH_MAX = 256
INLINE_TOKENS_MAX: Tokens = 8_192
"""The block keys of longer prompts are computed in a thread."""


@dataclass(frozen=True, slots=True)
class RequestResolver:
    parts: IngressParts
    pools: Pools
    rules: BodyRules

    @property
    def private(self) -> bool:
        """Whether clients learn nothing of the fleet and of each other."""
        return self.parts.salts is not None

    async def resolve(self, call: HttpExchange, endpoint: Endpoint, body: bytes, loan: BodyLoan) -> RequestContext:
        """The body is parsed, its model found, its prompt turned into tokens and block keys, the body written anew for engines; what
        the leader has to know of all that is the command. Meanwhile the body is there twice. Raises ApiError."""
        settings, work = self.parts.settings, self.parts.work
        with loan.scope():
            loan.add(len(body))
            accepted = await self.accept(call, endpoint, body)
            request, facts, owner = accepted.request, call.facts, call.owner
            slo = slo_of(call.headers, LatencySlo(settings.slo_ttft_seconds, settings.slo_tpot_seconds))
            pool, model = await self.find_model(call, request)
            lengths = RequestLengths(request, pool.fleet.context_of(model))
            tokens = await _tokens(call, request, pool, model, lengths)
            tenant = facts.tenant or ANONYMOUS
            group, salt = self._isolation(tenant, request.cache_salt)
            few_tokens = len(tokens.keyed) <= INLINE_TOKENS_MAX
            keys = await work.run_unless(few_tokens, owner, _packed_keys, pool, model, tokens.keyed, salt)
            sent = accepted.content
            if endpoint.parse is not None:
                imposed = salt if self.private else None
                sent = await work.run_unless(facts.light, owner, self._rewritten, accepted, imposed, tenant)
        output_tokens = lengths.output_bound(tokens.shortest)
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
            session=_session(call, request),
            exact=tokens.exact,
            streaming=request.stream,
            adapter=model.adapter,
            alias=model.alias,
            context_tokens=lengths.context_tokens(tokens),
            followed=True,
            cache_group=group,
            client_request_id=call.client_request_id,
            priority=priority_of(call.headers, request.service_tier, self.parts.policies.of(tenant).priority),
            answers=min(len(tokens.prompts) * request.answers, ANSWERS_MAX),
        )
        fetchable = pool.fleet.fetches and tokens.exact and tokens.longest
        return RequestContext(
            endpoint=endpoint,
            pool=pool,
            command=command,
            body=sent,
            removes_usage=self._adds_usage(request),
            usage_max=lengths.usage_max(tokens),
            output_bounded=output_tokens < OUTPUT_UNBOUNDED,
            begins_late=request.begins_late,
            comparable=request.answers == 1 and len(tokens.prompts) == 1,
            prefix_header=tokens.prefix_header,
            dropped_fields=accepted.dropped,
            model=model.name,
            prefix=PrefixPrompt(request.model, tokens.prompts[0], salt) if fetchable else None,
            private=self.private,
        )

    async def accept(self, call: HttpExchange, endpoint: Endpoint, body: bytes) -> AcceptedBody:
        """Parsed, with the fields that may go to engines. Raises ApiError."""
        light = call.facts.light = endpoint.is_light(body)
        return await self.parts.work.run_unless(light, call.owner, self.rules.accept, endpoint, body, call.headers)

    async def find_model(self, call: HttpExchange, request: ParsedRequest) -> tuple[Pool, Model]:
        """Raises ApiError."""
        facts = call.facts
        facts.model, facts.stream = cleaned(request.model) or None, request.stream
        if facts.identity is None:
            facts.tenant = tenant_of(call.headers, request.user)
        pool, model = await self.pools.await_model(request.model, facts.identity, owner=call.owner)
        facts.model, facts.pool = model.name, pool.name
        return pool, model

    def _isolation(self, tenant: Tenant, own_salt: str) -> tuple[str, str]:
        """Its cache group, and the salt of its blocks. `own_salt`: the client's."""
        salts = self.parts.salts
        if salts is None:
            return "", own_salt
        group = salts.group(tenant)
        return group, salts.salt(group, own_salt)

    def _adds_usage(self, request: ParsedRequest) -> bool:
        return request.may_add_usage and self.parts.settings.stream_usage

    def _rewritten(self, accepted: AcceptedBody, salt: str | None, tenant: Tenant) -> bytes:
        """JSON as engines get it."""
        body = accepted.content
        if salt is not None:
            body = impose_salt(body, salt, replaces=accepted.salted)
        if self.parts.settings.forward_tenant:
            body = add_tenant(body, tenant)
        return ask_for_usage(body) if self._adds_usage(accepted.request) else body


async def _tokens(
    call: HttpExchange, request: ParsedRequest, pool: Pool, model: Model, lengths: RequestLengths
) -> PromptTokens:
    """A prompt that is too long is refused before it is encoded, if its tokens came with it. Raises ApiError."""
    prompt = request.prompt
    lengths.check(max(map(len, prompt.prompts)) if isinstance(prompt, TokenIds) else 0)
    with call.span.child("tokenise") as span:
        context = TokenizeContext(call.headers, call.id, model, call.owner, call.facts.light, lengths.model_len, span)
        tokens = await pool.tokenizer.tokens(request, context)
        if span.recording:
            span.set({span_attributes.INPUT_TOKENS: tokens.count, span_attributes.PREFIX: tokens.prefix_header})
    call.facts.prompt_tokens = tokens.count
    if tokens.exact:
        lengths.check(tokens.longest)
    return tokens


def _session(call: HttpExchange, request: ParsedRequest) -> SessionId:
    """Under the tenant's name where credentials are required, so that nobody names another's conversation."""
    session = session_of(call.headers, request.session)
    if call.facts.identity is None or not session:
        return session
    return SessionId(f"{call.facts.tenant}/{session}"[:SESSION_LENGTH_MAX])


def _packed_keys(pool: Pool, model: Model, tokens: Sequence[int], cache_salt: str) -> bytes:
    try:
        return pool.block_keys.packed(model.base, tokens, lora=model.adapter, cache_salt=cache_salt)
    except ValueError as error:
        raise bad_request(f"{error}.", param="prompt") from error
