"""Which instance served a conversation last; breaks ties between instances. A conversation is identified by its
session, else by the last whole block of its latest prompt, which the next turn contains."""

from collections import OrderedDict
from typing import TypeVar

from pointsman.primitives import BlockKey, InstanceId, SessionId, Tenant

REMEMBERED_MAX = 50_000

K = TypeVar("K")


class SessionAffinity:
    """Bounded; least recently used conversations are dropped first."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[tuple[Tenant, SessionId], InstanceId] = OrderedDict()
        self._by_prompt: OrderedDict[BlockKey, InstanceId] = OrderedDict()

    def placed(self, tenant: Tenant, session: SessionId, keys: list[BlockKey], instance: InstanceId) -> None:
        if session:
            _remember(self._by_session, (tenant, session), instance)
        if keys:
            _remember(self._by_prompt, keys[-1], instance)

    def last_instance(self, tenant: Tenant, session: SessionId, keys: list[BlockKey]) -> InstanceId | None:
        if session:
            instance = self._by_session.get((tenant, session))
            if instance is not None:
                return instance
        by_prompt = self._by_prompt
        return next((by_prompt[key] for key in reversed(keys) if key in by_prompt), None)


def _remember(remembered: OrderedDict[K, InstanceId], key: K, instance: InstanceId) -> None:
    remembered[key] = instance
    remembered.move_to_end(key)
    if len(remembered) > REMEMBERED_MAX:
        remembered.popitem(last=False)
