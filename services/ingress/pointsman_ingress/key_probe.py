"""Checks for each engine whether our block keys equal its own: in, instances that become ready; out, InstanceProbed.

A short chat that nobody else has is tokenized and chained here, sent to that engine, and searched in the cache events of
its worker. If its last whole block appears, tokenizer, chat template, model name and secret agree. If not, a prompt of
token ids tells which half differs: the tokens, or everything from the engine's events to the keys.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.cache import BlocksStored, CacheSnapshot
from pointsman.contracts.fleet import InstanceProbed
from pointsman.ports import Clock, LogEntry, LogMissingError, LogUnavailableError
from pointsman.primitives import Epoch, InstanceId, Seconds, Tokens
from pointsman.runtime.containment import contained
from pointsman.runtime.supervision import Supervisor
from pointsman.state.fleet import Instance, Status
from pointsman_ingress.endpoints import CHAT_COMPLETIONS, COMPLETIONS, Endpoint
from pointsman_ingress.engine.client import EngineClient, EngineFailedError, EngineRequest
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.prompt.tokenization import TokenizeContext

log = structlog.get_logger()

ANSWER_WALL_SECONDS_MAX: Seconds = 60.0
"""How long a trial may take: an engine on a CPU computes a few hundred tokens in some seconds, longer while busy."""
EVENTS_WALL_SECONDS_MAX: Seconds = 10.0  # how long the engine's events may then take to show the prompt
ATTEMPTS_MAX = 3  # how often an engine that does not answer is asked in a row
PAUSE_WALL_SECONDS: Seconds = 2.0
REPEAT_WALL_SECONDS: Seconds = 30.0
REPEAT_WALL_SECONDS_MAX: Seconds = 600.0
"""Waits before an engine whose keys differ, or that did not answer, is probed again; they double."""


class NoVerdictError(Exception):
    """The engine or the log could not be asked."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    parity: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Trial:
    endpoint: Endpoint
    body: bytes
    tokens: Sequence[int]


class KeyProber:
    """Probes every ready instance of a pool whose keys were not found to agree in this epoch."""

    def __init__(
        self, pool: Pool, *, engines: EngineClient, clock: Clock, supervisor: Supervisor, chance: Random
    ) -> None:
        self._fleet = pool.fleet
        self._tokenizer = pool.tokenizer
        self._keys = pool.block_keys
        self._events = pool.events
        self._engines = engines
        self._clock = clock
        self._supervisor = supervisor
        self._chance = chance
        self._probed: set[tuple[InstanceId, Epoch, Tokens]] = set()

    async def run(self) -> None:
        """Runs forever, with a task per instance: one that differs takes long."""
        while True:
            await self._fleet.changed()
            for instance in self._fleet.instances:
                if self._is_due(instance):
                    self._probed.add(self._subject(instance))
                    self._supervisor.start(self._probe(instance), name=f"probe-{instance.id}")

    def _is_due(self, instance: Instance) -> bool:
        return (
            instance.status is Status.READY
            and instance.cache != "no_events"
            and (not instance.parity or self._sizes_differ(instance))
            and self._subject(instance) not in self._probed
            and self._fleet.fresh(instance)
        )

    def _subject(self, instance: Instance) -> tuple[InstanceId, Epoch, Tokens]:
        """What a verdict is about. A new leader may change the size of the pool's keys."""
        return instance.id, instance.epoch, self._keys.block_tokens

    def _sizes_differ(self, instance: Instance) -> bool:
        return instance.block_tokens != self._keys.block_tokens

    async def _probe(self, instance: Instance) -> None:
        """Until keys are found to agree, here or by another ingress, or the epoch is over."""
        subject, backoff = self._subject(instance), Backoff(REPEAT_WALL_SECONDS, REPEAT_WALL_SECONDS_MAX)
        with contained("probe"):
            while True:
                verdict = await self._attempts(instance)
                present = self._present(subject)
                if present is None:
                    return
                if verdict is not None and verdict.parity is not present.parity:
                    self._announce(present, verdict)
                if verdict is not None and verdict.parity:
                    return
                await self._clock.sleep_wall(backoff.next_wait())
                present = self._present(subject)
                if present is None or (present.parity and not self._sizes_differ(present)):
                    return
                instance = present

    def _present(self, subject: tuple[InstanceId, Epoch, Tokens]) -> Instance | None:
        """The instance as it is now; None if the subject has changed."""
        present = self._fleet.get(subject[0], subject[1])
        return present if present is not None and self._subject(present) == subject else None

    async def _attempts(self, instance: Instance) -> _Verdict | None:
        """None if the engine or the log could not be asked."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._verdict(instance)
            except NoVerdictError as error:
                log.warning("probe_failed", instance=instance.id, reason=str(error))
                await self._clock.sleep_wall(PAUSE_WALL_SECONDS)
                if self._fleet.get(instance.id, instance.epoch) is None:
                    break
        return None

    def _announce(self, instance: Instance, verdict: _Verdict) -> None:
        parity, detail = verdict.parity, verdict.detail
        (log.info if parity else log.warning)("instance_probed", instance=instance.id, parity=parity, detail=detail)
        now = self._clock.now()
        self._events.append_soon(
            InstanceProbed(at=now, instance=instance.id, epoch=instance.epoch, parity=parity, detail=detail)
        )

    async def _verdict(self, instance: Instance) -> _Verdict:
        """Raises NoVerdictError."""
        if self._sizes_differ(instance):
            own, pool = instance.block_tokens, self._keys.block_tokens
            detail = f"its keys stand for {own} tokens, those of the pool for {pool}: check --block-tokens"
            return _Verdict(parity=False, detail=detail)
        try:
            chat, exact = await self._chat_trial(instance)
            problem = "the keys of a chat differ" if exact else "tokens are guessed, not counted"
        except ApiError as error:
            chat, exact, problem = None, False, f"a chat cannot be tokenised: {error.message}"
        if chat is not None and exact and await self._matches(instance, chat):
            return _Verdict(parity=True, detail="the keys of a chat agree")
        if await self._matches(instance, self._token_trial(instance)):
            detail = f"{problem}, those of token ids agree: check the tokenizer and the chat template"
        else:
            detail = f"{problem}, and so do those of token ids: check secret, model name and the engine's KV events"
        return _Verdict(parity=False, detail=detail)

    async def _chat_trial(self, instance: Instance) -> tuple[_Trial, bool]:
        """A chat of at least two blocks, whatever the tokenizer, that is unlike any other from its start."""
        words = " ".join(f"{self._chance.randrange(10, 100)}" for _ in range(2 * self._keys.block_tokens))
        message = {"role": "user", "content": f"{self._chance.getrandbits(64):016x} {words}"}
        body = msgspec.json.encode({"model": instance.model, "messages": [message], "max_tokens": 1})
        context = TokenizeContext({}, self._request_id())
        tokens = await self._tokenizer.tokens(CHAT_COMPLETIONS.read(body, {}), context)
        return _Trial(CHAT_COMPLETIONS, body, tokens.prompts[0]), tokens.exact

    def _token_trial(self, instance: Instance) -> _Trial:
        """Small ids, which every vocabulary has."""
        tokens = [self._chance.randrange(100, 200) for _ in range(2 * self._keys.block_tokens)]
        body = msgspec.json.encode({"model": instance.model, "prompt": tokens, "max_tokens": 1})
        return _Trial(COMPLETIONS, body, tokens)

    async def _matches(self, instance: Instance, trial: _Trial) -> bool:
        """Whether the engine's events show the trial's last whole block in time. Raises NoVerdictError."""
        key = self._keys.last(instance.model, trial.tokens)
        if not key:
            return False
        try:
            start = (await self._events.extent()).last + 1
            await self._send(instance, trial)
            async with asyncio.timeout(EVENTS_WALL_SECONDS_MAX):
                return await self._appears(instance, key, start)
        except TimeoutError:
            return False
        except (EngineFailedError, LogUnavailableError, LogMissingError) as error:
            raise NoVerdictError(str(error)) from error

    async def _send(self, instance: Instance, trial: _Trial) -> None:
        """Raises EngineFailedError, also if the answer takes too long."""
        request = EngineRequest(instance.url, trial.endpoint.path, trial.body, {}, self._request_id(), instance.dp_rank)
        try:
            async with asyncio.timeout(ANSWER_WALL_SECONDS_MAX), await self._engines.send(request) as answer:
                body = await answer.whole()
        except TimeoutError as error:
            msg = f"no answer within {ANSWER_WALL_SECONDS_MAX:g} s"
            raise EngineFailedError(msg) from error
        if answer.status >= 400:
            msg = f"status {answer.status}: {body[:200].decode(errors='replace')}"
            raise EngineFailedError(msg)

    def _request_id(self) -> str:
        return f"probe-{self._chance.getrandbits(48):012x}"

    async def _appears(self, instance: Instance, key: bytes, start: int) -> bool:
        async for entry in self._events.read(start, kinds=(f"kv.{instance.id}",)):
            event = entry.event if isinstance(entry, LogEntry) else None
            if (
                isinstance(event, BlocksStored | CacheSnapshot)
                and event.epoch == instance.epoch
                and any(_holds(run.keys, key) for run in event.runs)
            ):
                return True
        return False


def _holds(keys: bytes, key: bytes) -> bool:
    return any(keys[start : start + KEY_BYTES] == key for start in range(0, len(keys), KEY_BYTES))
