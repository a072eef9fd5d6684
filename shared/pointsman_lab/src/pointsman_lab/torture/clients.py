"""Clients: prompts with shared prefixes, hang-ups, and a record of each result. The expected text is known."""

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import msgspec

from pointsman.adapters.sse import events_in
from pointsman.primitives import EngineSeconds, Tokens
from pointsman_cli.bench.answer import decoded_object
from pointsman_engine_sim.engine import prompt_hash
from pointsman_lab.torture.engines import MODEL, vocabulary
from pointsman_lab.torture.http import Exchange, post_scope
from pointsman_lab.torture.plan import ADAPTER, OVERLOAD_OBJECTIVES_MS, POOL_BLOCK_TOKENS, TENANTS, Plan
from pointsman_lab.torture.services import IngressProcess

Outcome = Literal["waits", "answered", "refused", "broken off", "cut", "hung up", "nobody there"]
HANG_UP_SHARE = 0.08
STEMS = 6
CONTINUED_SHARE = 0.3
CONVERSATION_TOKENS_MAX = 700
SALTED_SHARE = 0.12
SALTS = ("red", "blue")
ADAPTED_SHARE = 0.25
HURRIED_SHARE = 0.7
COMPLETIONS = "/v1/completions"


@dataclass(eq=False)
class ClientRequest:
    number: int
    prompt: list[int]
    max_tokens: Tokens
    stream: bool
    hangs_up_after: EngineSeconds | None
    own_id: str = ""
    session: str = ""
    salt: str = ""
    adapter: str = ""
    tenant: str = ""
    objective_ms: int = 0
    last: bool = False
    begun_at: EngineSeconds = 0.0
    ended_at: EngineSeconds = 0.0
    outcome: Outcome = "waits"
    status: int = 0
    code: str = ""
    instance: str = ""
    problem: str = ""
    exchange: Exchange | None = None

    @property
    def body(self) -> bytes:
        asked: dict[str, Any] = {"model": self.adapter or MODEL, "prompt": self.prompt, "max_tokens": self.max_tokens}
        if self.salt:
            asked["cache_salt"] = self.salt
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(asked)

    @property
    def expected(self) -> str:
        return vocabulary()[1].passage(prompt_hash(self.prompt)).text(0, self.max_tokens)


PATIENT_MS = "3600000"


@dataclass
class Traffic:
    plan: Plan
    chance: Random
    requests: list[ClientRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tenants = Random(f"tenants {self.plan.seed}")
        self._stems = [self._tokens(POOL_BLOCK_TOKENS * self.chance.randint(1, 8)) for _ in range(STEMS)]

    def new_request(self, *, last: bool = False) -> ClientRequest:
        chance = self.chance
        hangs_up = not last and chance.random() < HANG_UP_SHARE
        session, prompt, salt, adapter = self._asked(last=last)
        number = len(self.requests) + 1
        request = ClientRequest(
            number=number,
            prompt=prompt,
            max_tokens=chance.choice((1, 4, 20, 80)),
            stream=chance.random() < 0.7,
            hangs_up_after=chance.expovariate(2.0) if hangs_up else None,
            own_id=f"mine-{number}" if chance.random() < 0.5 else "",
            session=session,
            salt=salt,
            adapter=adapter,
            tenant=self._tenants.choice(TENANTS) if self.plan.tenants and not last else "",
            last=last,
        )
        if self.plan.overload and not last and chance.random() < HURRIED_SHARE:
            request.objective_ms = chance.choice(OVERLOAD_OBJECTIVES_MS)
        self.requests.append(request)
        return request

    def _asked(self, *, last: bool) -> tuple[str, list[int], str, str]:
        chance = self.chance
        going_on = [
            request
            for request in self.requests
            if len(request.prompt) < CONVERSATION_TOKENS_MAX and not request.adapter
        ]
        new = self._tokens(chance.randint(1, 4 * POOL_BLOCK_TOKENS))
        if going_on and chance.random() < CONTINUED_SHARE:
            before = chance.choice(going_on)
            return before.session, [*before.prompt, *self._tokens(before.max_tokens), *new], before.salt, ""
        salt = chance.choice(SALTS) if chance.random() < SALTED_SHARE else ""
        adapted = not last and any(self.plan.adapters) and chance.random() < ADAPTED_SHARE
        return f"talk-{len(self.requests)}", [*chance.choice(self._stems), *new], salt, ADAPTER if adapted else ""

    def _tokens(self, count: Tokens) -> list[int]:
        return [self.chance.randint(300, 4000) for _ in range(count)]


async def send(request: ClientRequest, ingress: IngressProcess) -> None:
    environment = ingress.environment
    request.begun_at = environment.loop.time()
    if ingress.app is None or ingress.run is None:
        request.outcome = "nobody there"
        request.ended_at = environment.loop.time()
        return
    headers = {"content-type": "application/json"}
    if request.own_id:
        headers["x-request-id"] = request.own_id
    if request.session:
        headers["x-session-id"] = request.session
    if request.tenant:
        headers["x-llm-d-inference-fairness-id"] = request.tenant
    if request.objective_ms:
        headers["x-slo-ttft-ms"] = str(request.objective_ms)
    if request.last:
        headers["x-slo-tpot-ms"] = PATIENT_MS
    exchange = request.exchange = Exchange(
        ingress, environment.loop, environment.chance("clients"), post_scope(COMPLETIONS, headers), request.body
    )
    exchange.begin(ingress.app)
    try:
        async with asyncio.timeout(request.hangs_up_after):
            await exchange.answered()
            body = await exchange.read()
    except TimeoutError:
        request.outcome = "hung up"
        exchange.close()
    except ConnectionResetError:
        request.outcome = "cut"
    else:
        request.status = exchange.status
        request.instance = exchange.headers.get("x-pointsman-instance", "")
        _judge(request, exchange, body)
    request.ended_at = environment.loop.time()
    exchange.release()


def _judge(request: ClientRequest, exchange: Exchange, body: bytes) -> None:
    if request.status != 200:
        request.outcome = "refused"
        request.code = str(decoded_object(body).get("error", {}).get("code", ""))
        if request.status == 500 or not request.code:
            request.problem = f"status {request.status}: {body[:200]!r}"
        return
    text, request.outcome = _streamed(request, body) if request.stream else (_whole(request, body), "answered")
    if request.outcome == "answered" and text != request.expected:
        request.problem = f"sent {text[-60:]!r}, not {request.expected[-60:]!r}"
    elif not request.expected.startswith(text):
        request.problem = f"sent {text[-60:]!r}, which does not begin as expected"
    if exchange.messages.count("http.response.start") != 1 or exchange.messages.count("end") != 1:
        request.problem = f"not one answer: {exchange.messages}"


def _whole(request: ClientRequest, body: bytes) -> str:
    answer = decoded_object(body)
    usage = answer.get("usage", {})
    if usage.get("completion_tokens") != request.max_tokens:
        request.problem = f"usage {usage}, asked for {request.max_tokens}"
    return str(answer["choices"][0]["text"])


def _streamed(request: ClientRequest, body: bytes) -> tuple[str, Outcome]:
    parts = []
    done = False
    outcome: Outcome = "answered"
    for data in events_in(body):
        if data == b"[DONE]":
            done = True
            continue
        event = decoded_object(data)
        if "error" in event:
            outcome = "broken off"
            request.code = str(event["error"].get("code", ""))
        parts += [str(choice.get("text", "")) for choice in event.get("choices", [])]
    if not done and outcome == "answered":
        request.problem = f"a stream without an end: {body[-100:]!r}"
    return "".join(parts), outcome
