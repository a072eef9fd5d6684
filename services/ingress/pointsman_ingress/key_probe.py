"""Verifies that our block keys equal each engine's; logs InstanceProbed. Sends a unique chat and waits for its last
block key in the cache events. A prompt of token ids shows whether tokenization or the keys differ. What another ingress
found is of its own secret, so ours are compared with one engine's all the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.cache import BlocksStored, CacheSnapshot
from pointsman.contracts.cache_salts import PROBE_GROUP
from pointsman.contracts.fleet import InstanceProbed
from pointsman.ports import LogEntry, LogUnavailableError
from pointsman.primitives import Epoch, InstanceId, Tokens, WallSeconds
from pointsman.runtime.containment import contained
from pointsman.runtime.health import HealthBoard
from pointsman.state.fleet import Instance, Status
from pointsman_ingress.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.engine.body_rewrites import SALT_FIELD
from pointsman_ingress.engine.client import EngineRequest
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.prompt.tokenization import TokenizeContext

log = structlog.get_logger()

ANSWER_WALL_SECONDS_MAX: WallSeconds = WallSeconds(60.0)  # CPU engines prefill slowly
EVENTS_WALL_SECONDS_MAX: WallSeconds = WallSeconds(10.0)  # until cache events show the prompt
ATTEMPTS_MAX = 3
AT_ONCE_MAX = 32
"""Of a large fleet that joins at once; 1,500 probes together hold up the requests for seconds."""
PAUSE_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
REPEAT_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
REPEAT_WALL_SECONDS_MAX: WallSeconds = WallSeconds(600.0)  # after a mismatch or no answer
KEYS_PART = "block keys"
UNSALTED = "the engine ignores `cache_salt`, so that tenants share its cache, or its KV events do not tell it"
UNPROVEN = "they are being compared with an engine's; until then answers say `degraded`"

Subject = tuple[InstanceId, Epoch, Tokens]  # a new leader may change the block size


class ProbeFailedError(Exception):
    """The engine or the log did not answer."""


@dataclass(eq=False)
class KeyProber:
    parts: IngressParts
    pool: Pool
    board: HealthBoard
    chance: Random
    _in_progress: set[Subject] = field(default_factory=set, init=False)
    """Those with a task, of instances that are there."""
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE_MAX), init=False)
    _proving: bool = field(default=False, init=False)
    """At an engine that another ingress agrees with: one at a time."""
    _disagreed: bool = field(default=False, init=False)
    """There; once may be events that were lost."""
    _first: set[Subject] = field(default_factory=set, init=False)
    """Probes whose first answer is awaited."""

    def __post_init__(self) -> None:
        salts = self.parts.salts
        self._salt = salts.salt(PROBE_GROUP, "") if salts else ""  # cache isolation is probed, too

    async def run(self) -> None:
        """Runs without end; one task per instance."""
        while True:
            await self.pool.fleet.changed()
            self._in_progress = {known for known in self._in_progress if self.pool.fleet.get(known[0], known[1])}
            for instance in self.pool.fleet.instances:
                subject = self._subject(instance)
                agrees = self._agrees(instance)
                due = not agrees or not (self._settled or self._proving)
                due = due and instance.status is Status.READY and instance.cache != "no_events"
                if due and subject not in self._in_progress and self.pool.fleet.fresh(instance):
                    self._in_progress.add(subject)
                    self._proving |= agrees
                    self.parts.supervisor.start(self._probe(instance, subject), name=f"probe-{instance.id}")

    @property
    def _settled(self) -> bool:
        """Whether our keys have agreed, and no comparison since has contradicted that."""
        return self.pool.block_keys.proven and not self._disagreed

    def _subject(self, instance: Instance) -> Subject:
        return instance.id, instance.epoch, self.pool.block_keys.block_tokens

    def _agrees(self, instance: Instance) -> bool:
        return bool(instance.parity) and instance.block_tokens == self.pool.block_keys.block_tokens

    async def _probe(self, instance: Instance, subject: Subject) -> None:
        """Until the log says that the keys agree, as a verdict may be lost on its way, and ours do."""
        backoff = Backoff(REPEAT_WALL_SECONDS, REPEAT_WALL_SECONDS_MAX)
        current: Instance | None = instance
        self._first.add(subject)
        self._show_unproven()
        while current is not None and not (self._agrees(current) and self._settled):
            with contained("probe"):
                verdict = await self._check_repeatedly(current) if current.serving else None
                current = self._current(subject)
                # No events come of an engine that is not followed: it may have restarted with blocks that do not fit.
                if current and verdict and (verdict[0] or current.serving):
                    self._conclude(current, *verdict)
            self._proving = False
            self._answered(subject)
            await self.parts.clock.sleep_wall(backoff.next_wait())
            current = self._current(subject)
        self._in_progress.discard(subject)
        self._answered(subject)

    def _answered(self, subject: Subject) -> None:
        """Or not: some engines cannot be asked."""
        self._first.discard(subject)
        self._show_unproven()

    def _show_unproven(self) -> None:
        if self._disagreed:
            return
        if self._first and not self.pool.block_keys.proven:
            self.board.degraded(KEYS_PART, UNPROVEN)
        else:
            self.board.restored(KEYS_PART)

    def _current(self, subject: Subject) -> Instance | None:
        current = self.pool.fleet.get(subject[0], subject[1])
        return current if current is not None and self._subject(current) == subject else None

    def _conclude(self, instance: Instance, parity: bool, detail: str) -> None:
        if parity:
            self.pool.block_keys.proven, self._disagreed = True, False
            self.board.restored(KEYS_PART)
        elif instance.parity:
            if self._disagreed:
                self.board.degraded(
                    KEYS_PART, f"another ingress's agree with those of {instance.id}, but here {detail}"
                )
            self._disagreed = True
            return
        if parity is not instance.parity:
            self._announce(instance, parity=parity, detail=detail)

    def _announce(self, instance: Instance, *, parity: bool, detail: str) -> None:
        (log.info if parity else log.warning)("instance_probed", instance=instance.id, parity=parity, detail=detail)
        now = self.parts.clock.now()
        self.pool.events.append_soon(
            InstanceProbed(at=now, instance=instance.id, epoch=instance.epoch, parity=parity, detail=detail)
        )

    async def _check_repeatedly(self, instance: Instance) -> tuple[bool, str] | None:
        for _ in range(ATTEMPTS_MAX):
            try:
                async with self._at_once:
                    return await self._check(instance)
            except ProbeFailedError as error:
                log.warning("probe_failed", instance=instance.id, reason=str(error))
                await self.parts.clock.sleep_wall(PAUSE_WALL_SECONDS)
                if self.pool.fleet.get(instance.id, instance.epoch) is None:
                    break
        return None

    async def _check(self, instance: Instance) -> tuple[bool, str]:
        own, pool = instance.block_tokens, self.pool.block_keys.block_tokens
        if own != pool:
            return False, f"its keys stand for {own} tokens, those of the pool for {pool}: check --block-tokens"
        try:
            body, tokens, exact = await self._chat(instance)
            if not exact:  # perhaps another engine failed to count them, which is avoided now
                body, tokens, exact = await self._chat(instance)
        except ApiError as error:
            problem = f"a chat cannot be tokenised: {error.message}"
        else:
            if exact and await self._matches(instance, CHAT_COMPLETIONS.path, body, tokens, self._salt):
                return True, "the keys of a chat agree"
            problem = "the keys of a chat differ" if exact else "tokens are guessed, not counted"
        if await self._ids_match(instance, self._salt):
            return False, f"{problem}, those of token ids agree: check the tokenizer and the chat template"
        if self._salt and await self._ids_match(instance, ""):
            return False, UNSALTED
        return False, f"{problem}, and so do those of token ids: check secret, model name, prefix caching and KV events"

    async def _ids_match(self, instance: Instance, key_salt: str) -> bool:
        count = 2 * self.pool.block_keys.block_tokens
        ids = [self.chance.randrange(100, 200) for _ in range(count)]  # in any vocabulary
        body = msgspec.json.encode(self._salted({"model": instance.model, "prompt": ids, "max_tokens": 1}))
        return await self._matches(instance, COMPLETIONS.path, body, ids, key_salt)

    async def _chat(self, instance: Instance) -> tuple[bytes, Sequence[int], bool]:
        """Returns the body of a unique chat of at least two blocks, its tokens, and whether they are exact."""
        words = " ".join(f"{self.chance.randrange(10, 100)}" for _ in range(2 * self.pool.block_keys.block_tokens))
        message = {"role": "user", "content": f"{self.chance.getrandbits(64):016x} {words}"}
        body = msgspec.json.encode(self._salted({"model": instance.model, "messages": [message], "max_tokens": 1}))
        context = TokenizeContext({}, self._request_id())
        tokens = await self.pool.tokenizer.tokens(CHAT_COMPLETIONS.read(body, {}), context)
        return body, tokens.prompts[0], tokens.exact

    def _salted(self, fields: dict[str, object]) -> dict[str, object]:
        return {**fields, SALT_FIELD: self._salt} if self._salt else fields

    async def _matches(self, instance: Instance, path: str, body: bytes, tokens: Sequence[int], key_salt: str) -> bool:
        """Whether the engine's events show the prompt under `key_salt`."""
        key = self.pool.block_keys.last(instance.model, tokens, cache_salt=key_salt)
        if not key:
            return False
        try:
            start = (await self.pool.events.extent()).last + 1
            await self._send(instance, path, body)
            async with asyncio.timeout(float(EVENTS_WALL_SECONDS_MAX)):
                return await self._appears(instance, key, start)
        except TimeoutError:
            return False
        except (EngineFailedError, LogUnavailableError) as error:
            raise ProbeFailedError(str(error)) from error

    async def _send(self, instance: Instance, path: str, body: bytes) -> None:
        request = EngineRequest(instance.id, instance.url, path, body, {}, self._request_id(), instance.dp_rank)
        try:
            async with asyncio.timeout(float(ANSWER_WALL_SECONDS_MAX)):
                status, content = await self.parts.engines.ask(request)
        except TimeoutError as error:
            raise EngineFailedError(f"no answer within {ANSWER_WALL_SECONDS_MAX:g} s") from error
        if status >= 400:
            raise EngineFailedError(f"status {status}: {content[:200].decode(errors='replace')}")

    def _request_id(self) -> str:
        return f"probe-{self.chance.getrandbits(48):012x}"

    async def _appears(self, instance: Instance, key: bytes, start: int) -> bool:
        async for entry in self.pool.events.read(start, kinds=(f"kv.{instance.id}",)):
            event = entry.event if isinstance(entry, LogEntry) else None
            if not isinstance(event, BlocksStored | CacheSnapshot) or event.epoch != instance.epoch:
                continue
            if any(_contains(run.keys, key) for run in event.runs):
                return True
        return False


def _contains(keys: bytes, key: bytes) -> bool:
    return any(keys[start : start + KEY_BYTES] == key for start in range(0, len(keys), KEY_BYTES))
