"""Changes of API keys: checks a command and writes the bucket. Several leaders, of several pools, may write: each write
names the revision that it replaces."""

import hmac

import msgspec

from pointsman.contracts.access import ApiKey, decode_key, name_of_key, scope_refusal, secret_proof, valid_tenant
from pointsman.contracts.commands import ChangeApiKey
from pointsman.ports import Clock, KeyValueStore, StoreUnavailableError, ValueChangedError, unix_now
from pointsman.primitives import Moment

WRITES_MAX = 3


class KeyRefusedError(Exception):
    """Nothing was changed, or it is not known; the message says which."""


class ApiKeyWriter:
    def __init__(self, store: KeyValueStore, clock: Clock, secret: str) -> None:
        self._store = store
        self._clock = clock
        self._secret = secret

    async def change(self, command: ChangeApiKey, by: str) -> ApiKey | None:
        """Returns the key as written; None if it was so already. Raises KeyRefusedError."""
        try:
            for _ in range(WRITES_MAX):
                known, revision = await self._known(command.key.id)
                changed = self._changed(command, known, by)
                if changed is None:
                    return None
                try:
                    await self._store.put(name_of_key(changed.id), msgspec.json.encode(changed), after=revision)
                except ValueChangedError:
                    continue
                return changed
        except StoreUnavailableError as error:
            raise KeyRefusedError(
                f"the store does not answer ({error}); 'pointsman keys list' shows whether it was done"
            ) from error
        raise KeyRefusedError("others change this key at the same moment")

    async def _known(self, key: str) -> tuple[ApiKey | None, int]:
        found = await self._store.get(name_of_key(key))
        if found is None:
            return None, 0
        try:
            return decode_key(found.value), found.revision
        except ValueError as error:
            raise KeyRefusedError(f"what is stored as the key {key} does not decode: {error}") from error

    def _changed(self, command: ChangeApiKey, known: ApiKey | None, by: str) -> ApiKey | None:
        """Raises KeyRefusedError."""
        now = unix_now(self._clock)
        if command.action == "create":
            if not hmac.compare_digest(command.secret_proof, secret_proof(self._secret, command.key.id)):
                raise KeyRefusedError(
                    "the command and the scheduler have different secrets; ingresses would not admit the key"
                )
            return _created(command.key, known, now, by)
        if known is None:
            raise KeyRefusedError(f"there is no key {command.key.id}")
        if command.action == "revoke":
            return None if known.revoked_at else msgspec.structs.replace(known, revoked_at=now)
        return _outlived(known, command.key.expires_at, now)


def _created(asked: ApiKey, known: ApiKey | None, now: Moment, by: str) -> ApiKey | None:
    if known is not None and known.digest == asked.digest and known.tenant == asked.tenant:
        return None  # the command came twice
    refusal = scope_refusal(asked.models, asked.endpoints)
    if known is not None:
        refusal = f"there is a key {asked.id} already"
    elif not valid_tenant(asked.tenant):
        refusal = "a tenant's name begins with a letter or digit and has at most 128 of A-Z a-z 0-9 _ . @ : | / + = -"
    elif asked.expires_at and asked.expires_at <= now:
        refusal = "it would have expired already"
    if refusal:
        raise KeyRefusedError(refusal)
    return msgspec.structs.replace(asked, created_at=now, created_by=by, revoked_at=0.0)


def _outlived(known: ApiKey, expires_at: Moment, now: Moment) -> ApiKey | None:
    if known.revoked_at or 0 < known.expires_at <= now:
        raise KeyRefusedError(f"the key {known.id} is no longer valid")
    expires_at = max(now, expires_at)
    if 0 < known.expires_at <= expires_at:
        return None
    return msgspec.structs.replace(known, expires_at=expires_at)
