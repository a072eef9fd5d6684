"""What a request needs to be delivered: complete, and does not change (`resolver` makes it); and what the head of its answer
says of its placement, as `x-pointsman-...` headers."""

from dataclasses import dataclass
from math import ceil

from pointsman.contracts.commands import RouteGranted, RouteRequest
from pointsman.state.fleet import Knowledge
from pointsman_ingress import metrics
from pointsman_ingress.endpoints import Endpoint
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.engine.usage import Usage
from pointsman_ingress.http.errors import Header
from pointsman_ingress.metrics import ModelMetrics
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.prompt.body_fields import DROPPED_HEADER


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

    def answer_headers(self, grant: RouteGranted) -> list[Header]:
        """A client with a key learns what concerns itself, and nothing of instances and their load. How late a best-effort
        answer comes it has to know: in whole seconds, which hide most of the load."""
        headers = [] if self.private else [(b"x-pointsman-instance", grant.instance.encode())]
        headers += [
            (b"x-pointsman-cached-tokens", b"%d" % grant.hit_tokens),
            (b"x-pointsman-prefix", self.prefix_header.encode()),
        ]
        if grant.best_effort:
            headers.append((b"x-pointsman-best-effort", b"true"))
            if self.private:
                headers.append((b"x-pointsman-predicted-ttft-ms", b"%d" % (ceil(grant.predicted_ttft) * 1000)))
        if not self.private:
            headers += self._fleet_headers(grant)
        if self.dropped_fields:
            headers.append((DROPPED_HEADER, self.dropped_fields.encode()))
        return headers

    def _fleet_headers(self, grant: RouteGranted) -> list[Header]:
        knowledge = grant.knowledge
        if knowledge == Knowledge.EXACT and not (self.command.exact and self.pool.block_keys.proven):
            knowledge = Knowledge.DEGRADED  # its tokens are inexact, or the secret here may be another one
        headers = [
            (b"x-pointsman-predicted-ttft-ms", b"%.1f" % (grant.predicted_ttft * 1000)),
            (b"x-pointsman-knowledge", knowledge.encode()),
        ]
        if grant.predicted_ttft_upper:
            headers.append((b"x-pointsman-predicted-ttft-upper-ms", b"%.1f" % (grant.predicted_ttft_upper * 1000)))
        if grant.prefilled_by:
            headers.append((b"x-pointsman-prefill-instance", grant.prefilled_by.encode()))
        return headers
