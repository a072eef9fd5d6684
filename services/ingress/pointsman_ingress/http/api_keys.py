"""API keys, from the deployment's key-value store. A sent key is hashed with the secret and looked up by its digest, so
that neither the time nor the answer tells anything of other keys. Changes come within a second; while NATS is away the
last copy holds."""

from dataclasses import dataclass

import structlog

from pointsman.contracts.access import KEY_NAMES, decode_key, key_hash, name_of_key
from pointsman.ports import Clock, KeyValueStore, StoredValue, ValuesRead, unix_now
from pointsman.primitives import Moment
from pointsman.runtime.containment import contained
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.http.errors import credentials_unread, invalid_credential
from pointsman_ingress.http.identity import Identity

log = structlog.get_logger()

KEYS_PART = "api_keys"


@dataclass(frozen=True, slots=True)
class _ActiveKey:
    identity: Identity
    expires_at: Moment


class ApiKeys:
    def __init__(self, secret: str, clock: Clock, board: HealthBoard) -> None:
        self._hash = key_hash(secret)
        self._clock = clock
        self._board = board
        self._active: dict[bytes, _ActiveKey] = {}
        self._digests: dict[str, bytes] = {}
        self._is_read = False
        board.missing(KEYS_PART, "the API keys are not read yet")

    def identity(self, key: bytes) -> Identity:
        """Raises ApiError (401; 503 before the keys are read)."""
        if not self._is_read:
            raise credentials_unread()
        known = self._active.get(self._hash(key))
        if known is None or (known.expires_at and known.expires_at <= unix_now(self._clock)):
            raise invalid_credential()
        return known.identity

    async def follow(self, store: KeyValueStore) -> None:
        """Runs without end."""
        async for read in store.follow(KEY_NAMES):
            with contained("api_keys"):
                self.take(read)

    def take(self, read: ValuesRead) -> None:
        if read.unread:
            self._lose_sight(read.unread)
            return
        if not read.exists and self._active:
            lost = "the store of API keys is gone; the last copy holds"
            self._board.degraded(KEYS_PART, lost)
            log.error("api_keys_lost", keys=len(self._active))
            return
        if read.whole:
            self._active, self._digests = {}, {}
        for value in read.values:
            self._store(value)
        if read.values or read.whole:
            log.info("api_keys_read", changed=len(read.values), active=len(self._active))
        self._is_read = True
        self._board.restored(KEYS_PART)

    def _lose_sight(self, reason: str) -> None:
        if not self._is_read:
            self._board.missing(KEYS_PART, f"the API keys are not read yet: {reason}")
            return
        stale = f"the store of API keys does not answer ({reason}); the last copy holds, so new and revoked keys wait"
        self._board.degraded(KEYS_PART, stale)
        log.warning("api_keys_unread", reason=reason, active=len(self._active))

    def _store(self, value: StoredValue) -> None:
        """What does not decode is no key: its former version must not stay valid."""
        self._active.pop(self._digests.pop(value.key, b""), None)
        try:
            key = decode_key(value.value)
        except ValueError as error:
            log.warning("api_key_undecodable", key=value.key, problem=str(error))
            return
        if value.key == name_of_key(key.id) and not key.revoked_at:
            identity = Identity(key.tenant, tuple(key.models), tuple(key.endpoints))
            self._active[key.digest] = _ActiveKey(identity, key.expires_at)
            self._digests[value.key] = key.digest
