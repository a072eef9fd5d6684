"""What is known of one request: `RequestFacts` grow while it is read, the `RequestContext` is complete and does not change
(`resolver` makes it)."""

from dataclasses import dataclass

from pointsman.contracts.commands import RouteRequest
from pointsman.primitives import InstanceId, PoolName, Tenant, Tokens
from pointsman_ingress import metrics
from pointsman_ingress.endpoints import Endpoint
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.engine.usage import Usage
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.metrics import ModelMetrics
from pointsman_ingress.placement.pools import Pool


@dataclass(slots=True)
class RequestFacts:
    identity: Identity | None = None
    tenant: Tenant | None = None
    model: str | None = None
    pool: PoolName | None = None
    stream: bool = False
    prompt_tokens: Tokens | None = None
    instance: InstanceId | None = None
    retries: int = 0
    reason: str = ""
    light: bool = False
    """Whether its body may be worked on in the event loop."""

    def owner(self, call: HttpExchange) -> str:
        """Whose share of work threads, body memory and held requests it takes."""
        return self.tenant or call.client or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    endpoint: Endpoint
    pool: Pool
    command: RouteRequest
    owner: str  # of the work on its body (`WorkThreads`) and of its place in the `HoldQueue`
    headers: Headers
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
