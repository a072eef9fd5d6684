"""Removes instances at URLs that the operator does not allow (`--engine-urls`)."""

import structlog

from pointsman.policies.dispatch import Dispatcher
from pointsman.primitives import EngineSeconds, Epoch, InstanceId
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.telemetry import ENGINE_URLS_REFUSED

log = structlog.get_logger()

REFUSED_MAX = 1_000


class EngineUrlGuard:
    def __init__(self, urls: EngineUrls) -> None:
        self._urls = urls
        self._refused: dict[InstanceId, Epoch] = {}

    def is_refused(self, instance: InstanceId, epoch: Epoch) -> bool:
        """Whether its last join was refused: it is not asked to join again. Another worker with the same name is."""
        return self._refused.get(instance) == epoch

    def refuse(self, dispatcher: Dispatcher, now: EngineSeconds) -> None:
        for instance in dispatcher.state.fleet.instances:
            if self._urls.cover(instance.id, instance.url):
                self._refused.pop(instance.id, None)
                continue
            self._remember(instance.id, instance.epoch)
            reason = self._urls.refusal(instance.id, instance.url)
            ENGINE_URLS_REFUSED.inc()
            log.error("instance_refused", instance=instance.id, url=instance.url[:200], reason=reason)
            dispatcher.refuse(instance.id, reason, now)

    def _remember(self, instance: InstanceId, epoch: Epoch) -> None:
        self._refused[instance] = epoch
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
