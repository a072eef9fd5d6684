"""What a request needs to be delivered: complete, and does not change (`resolver` makes it)."""

from dataclasses import dataclass

from pointsman.contracts.commands import RouteRequest
from pointsman_ingress import metrics
from pointsman_ingress.endpoints import Endpoint
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.engine.usage import Usage
from pointsman_ingress.metrics import ModelMetrics
from pointsman_ingress.placement.pools import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    endpoint: Endpoint
    pool: Pool
    command: RouteRequest
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
