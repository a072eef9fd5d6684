"""Do our block keys equal those of the engine? Asked in each life of an engine until they do, with a prompt nobody else has.

A short chat is tokenised and chained here as clients' prompts are, sent straight to that engine, and awaited among
the cache events that its worker publishes. If its last whole block turns up, tokenizer, chat template, model name and
secret agree. If not, a prompt of token ids is tried, so that the verdict says which half differs:
the tokens, or everything from the engine's events to the keys. Where the worker's keys stand for other blocks than the
pool's, the verdict needs no trial.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import structlog

from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.cache import BlocksStored, CacheSnapshot
from pointsman.contracts.fleet import InstanceProbed
from pointsman.ports import Clock, EventLog, LogEntry, LogMissingError, LogUnavailableError
from pointsman.primitives import Epoch, InstanceId, Seconds, Tokens
from pointsman.runtime.containment import contained
from pointsman.runtime.supervision import Supervisor
from pointsman.state.fleet import Instance, Status
from pointsman_ingress.engine.proxy import EngineClient, EngineFailedError
from pointsman_ingress.http.endpoints import CHAT_COMPLETIONS, COMPLETIONS, Endpoint
from pointsman_ingress.http.openai_errors import Refusal
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.prompt.keys import Keys
from pointsman_ingress.prompt.tokenization import TokenizeContext, Tokenizing

log = structlog.get_logger()

ANSWER_WALL_SECONDS_MAX: Seconds = 60.0
"""How long a trial may take to be answered: an engine on a CPU computes a few hundred tokens in some seconds, more of
them where it is busy."""

EVENTS_WALL_SECONDS_MAX: Seconds = 10.0
"""How long the engine's events may then take to show the prompt."""

ATTEMPTS_MAX = 3
"""How often an engine that does not answer is asked before it is left alone for a while."""

PAUSE_WALL_SECONDS: Seconds = 2.0
AGAIN_WALL_SECONDS: Seconds = 30.0
"""After so long an engine whose keys differ, or that did not answer, is probed again; each time twice as long after the last,
until AGAIN_WALL_SECONDS_MAX."""
AGAIN_WALL_SECONDS_MAX: Seconds = 600.0


class NoVerdictError(Exception):
    """The engine or the log could not be asked; that says nothing about the keys."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One prompt to send, and its tokens as we see them."""

    endpoint: Endpoint
    body: bytes
    tokens: Sequence[int]


class Prober:
    """Probes every instance that is ready and whose keys were not found to agree in this life."""

    def __init__(
        self,
        *,
        fleet: FleetView,
        tokenising: Tokenizing,
        keys: Keys,
        engines: EngineClient,
        events: EventLog,
        clock: Clock,
        supervisor: Supervisor,
        chance: Random,
    ) -> None:
        self._fleet = fleet
        self._tokenising = tokenising
        self._keys = keys
        self._engines = engines
        self._events = events
        self._clock = clock
        self._supervisor = supervisor
        self._chance = chance
        self._seen: set[tuple[InstanceId, Epoch, Tokens]] = set()

    async def run(self) -> None:
        """Probe for ever, each instance in a task of its own: one that differs takes long to find out."""
        while True:
            await self._fleet.changed()
            for instance in self._waiting():
                self._seen.add(self._life(instance))
                self._supervisor.start(self._probe_contained(instance), name=f"probe-{instance.id}")

    def _waiting(self) -> list[Instance]:
        return [
            instance
            for instance in self._fleet.instances
            if instance.status is Status.READY
            and instance.cache != "no_events"
            and (not instance.parity or self._keys_differ(instance))
            and self._life(instance) not in self._seen
            and self._fleet.fresh(instance)
        ]

    def _life(self, instance: Instance) -> tuple[InstanceId, Epoch, Tokens]:
        """What a verdict is about. A leader that comes may say that the pool's keys stand for something else."""
        return instance.id, instance.epoch, self._keys.block_tokens

    def _keys_differ(self, instance: Instance) -> bool:
        return instance.block_tokens != self._keys.block_tokens

    async def _probe_contained(self, instance: Instance) -> None:
        with contained("probe"):
            await self._probe(instance)

    async def _probe(self, instance: Instance) -> None:
        """Until keys are found to agree, here or by another ingress, or this life is over."""
        life, pause = self._life(instance), AGAIN_WALL_SECONDS
        while True:
            verdict = await self._attempts(instance)
            present = self._present(life)
            if present is None:
                return
            if verdict is not None and verdict[0] is not present.parity:
                self._announce(present, parity=verdict[0], detail=verdict[1])
            if verdict is not None and verdict[0]:
                return
            await self._clock.sleep_wall(pause)
            pause = min(2 * pause, AGAIN_WALL_SECONDS_MAX)
            present = self._present(life)
            if present is None or (present.parity and not self._keys_differ(present)):
                return
            instance = present

    def _present(self, life: tuple[InstanceId, Epoch, Tokens]) -> Instance | None:
        """The instance as it is known now, if this is still its life and what the pool's keys stand for."""
        present = self._fleet.get(life[0], life[1])
        return present if present is not None and self._life(present) == life else None

    async def _attempts(self, instance: Instance) -> tuple[bool, str] | None:
        """Parity and its detail; None where the engine or the log could not be asked."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._verdict(instance)
            except NoVerdictError as error:
                log.warning("probe_failed", instance=instance.id, reason=str(error))
                await self._clock.sleep_wall(PAUSE_WALL_SECONDS)
                if self._fleet.get(instance.id, instance.epoch) is None:
                    break
        return None

    def _announce(self, instance: Instance, *, parity: bool, detail: str) -> None:
        (log.info if parity else log.warning)("instance_probed", instance=instance.id, parity=parity, detail=detail)
        self._events.append_soon(
            InstanceProbed(
                at=self._clock.now(), instance=instance.id, epoch=instance.epoch, parity=parity, detail=detail
            )
        )

    async def _verdict(self, instance: Instance) -> tuple[bool, str]:
        """Parity and its detail. Raises NoVerdictError."""
        if self._keys_differ(instance):
            own, pool = instance.block_tokens, self._keys.block_tokens
            return False, f"its keys stand for {own} tokens, those of the pool for {pool}: check --block-tokens"
        try:
            chat, exact = await self._chat_trial(instance)
        except Refusal as refusal:
            chat, exact, doubt = None, False, f"a chat cannot be tokenised: {refusal.message}"
        else:
            doubt = "" if exact else "tokens are guessed, not counted"
        if chat is not None and exact and await self._matches(instance, chat):
            return True, "the keys of a chat agree"
        doubt = doubt or "the keys of a chat differ"
        if await self._matches(instance, self._token_trial(instance)):
            return False, f"{doubt}, those of token ids agree: check the tokenizer and the chat template"
        return False, f"{doubt}, and so do those of token ids: check secret, model name and the engine's KV events"

    async def _chat_trial(self, instance: Instance) -> tuple[_Trial, bool]:
        """A chat that is at least two blocks long, whatever the tokenizer, and unlike any other from its start."""
        words = " ".join(f"{self._chance.randrange(10, 100)}" for _ in range(2 * self._keys.block_tokens))
        message = {"role": "user", "content": f"{self._chance.getrandbits(64):016x} {words}"}
        body = msgspec.json.encode({"model": instance.model, "messages": [message], "max_tokens": 1})
        tokens = await self._tokenising.tokens(CHAT_COMPLETIONS.read(body, {}), TokenizeContext({}, self._request_id()))
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
        """Raises EngineFailedError, also where the answer takes too long."""
        try:
            async with asyncio.timeout(ANSWER_WALL_SECONDS_MAX):
                await self._answered(instance, trial)
        except TimeoutError as error:
            msg = f"no answer within {ANSWER_WALL_SECONDS_MAX:g} s"
            raise EngineFailedError(msg) from error

    async def _answered(self, instance: Instance, trial: _Trial) -> None:
        async with await self._engines.send(
            instance.url, trial.endpoint.path, trial.body, {}, self._request_id(), dp_rank=instance.dp_rank
        ) as answer:
            body = await answer.whole()
            if answer.status >= 400:
                msg = f"status {answer.status}: {body[:200].decode(errors='replace')}"
                raise EngineFailedError(msg)

    def _request_id(self) -> str:
        return f"probe-{self._chance.getrandbits(48):012x}"

    async def _appears(self, instance: Instance, key: bytes, start: int) -> bool:
        async for entry in self._events.read(start, kinds=(f"kv.{instance.id}",)):
            if not isinstance(entry, LogEntry):
                continue
            event = entry.event
            if (
                isinstance(event, BlocksStored | CacheSnapshot)
                and event.epoch == instance.epoch
                and any(_holds(run.keys, key) for run in event.runs)
            ):
                return True
        return False


def _holds(keys: bytes, key: bytes) -> bool:
    """Whether packed `keys` contain `key` (8 bytes)."""
    return any(keys[start : start + KEY_BYTES] == key for start in range(0, len(keys), KEY_BYTES))
