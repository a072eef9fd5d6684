"""What the head of an answer says of its placement. In: a request, its grant. Out: `x-pointsman-...` headers."""

from math import ceil

from pointsman.contracts.commands import RouteGranted
from pointsman.state.fleet import Knowledge
from pointsman_ingress.context import RequestContext
from pointsman_ingress.http.errors import Header
from pointsman_ingress.prompt.body_fields import DROPPED_HEADER


def answer_headers(context: RequestContext, grant: RouteGranted) -> list[Header]:
    """A client with a key learns what concerns itself, and nothing of instances and their load. How late a best-effort
    answer comes it has to know: in whole seconds, which hide most of the load."""
    private = context.private
    headers = [] if private else [(b"x-pointsman-instance", grant.instance.encode())]
    headers += [
        (b"x-pointsman-cached-tokens", b"%d" % grant.hit_tokens),
        (b"x-pointsman-prefix", context.prefix_header.encode()),
    ]
    if grant.best_effort:
        headers.append((b"x-pointsman-best-effort", b"true"))
        if private:
            headers.append((b"x-pointsman-predicted-ttft-ms", b"%d" % (ceil(grant.predicted_ttft) * 1000)))
    if not private:
        headers += _fleet_headers(context, grant)
    if context.dropped_fields:
        headers.append((DROPPED_HEADER, context.dropped_fields.encode()))
    return headers


def _fleet_headers(context: RequestContext, grant: RouteGranted) -> list[Header]:
    knowledge = grant.knowledge
    if knowledge == Knowledge.EXACT and not (context.command.exact and context.pool.block_keys.proven):
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
