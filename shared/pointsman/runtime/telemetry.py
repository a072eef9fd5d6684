"""Structured logs, and all metrics with unit and meaning. `docs/operations.md` lists them; a test compares."""

import contextlib
import logging
import os
import sys
from functools import partial
from typing import TextIO, cast

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from structlog.typing import EventDict

from pointsman.runtime import bounded_metrics
from pointsman.runtime.bounded_metrics import Counter, Histogram
from pointsman.runtime.log_pace import LogPace

TRACEBACK_LINES_MAX = 500
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

Gauge = partial(bounded_metrics.Gauge, multiprocess_mode="livemax")
"""The maximum over processes; counters and histograms are summed."""

LATENCY_BUCKETS_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

HTTP_REQUESTS = Counter(
    "pointsman_http_requests_total", "Client requests answered, by route and HTTP status.", ["route", "status"]
)
HTTP_CONNECTIONS_REFUSED = Counter(
    "pointsman_http_connections_refused_total",
    "Connections that ended because of what came, or did not come, before a request: malformed, head_too_large, "
    "head_timeout, pipelined, connections or connections_per_address (too many), idle_evicted or opening_evicted (for a new one); or because "
    "of an answer_unread.",
    ["reason"],
)
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "pointsman_time_to_first_token_seconds",
    "Time to first token seen by the ingress, engine time.",
    buckets=LATENCY_BUCKETS_SECONDS,
)
TIME_PER_OUTPUT_TOKEN_SECONDS = Histogram(
    "pointsman_time_per_output_token_seconds",
    "Mean time per output token after the first, engine time.",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
)
E2E_REQUEST_LATENCY_SECONDS = Histogram(
    "pointsman_e2e_request_latency_seconds",
    "From arrival to the end of the answer, engine time.",
    buckets=LATENCY_BUCKETS_SECONDS,
)
SLO_OUTCOMES = Counter(
    "pointsman_slo_outcomes_total", "Finished requests by whether their TTFT met the objective.", ["outcome"]
)
PROMPT_TOKENS = Counter("pointsman_prompt_tokens_total", "Prompt tokens of finished requests.", ["instance"])
CACHED_TOKENS = Counter(
    "pointsman_cached_tokens_total", "Prompt tokens that the engine took from its cache, as it reports.", ["instance"]
)
PREDICTED_CACHED_TOKENS = Counter(
    "pointsman_predicted_cached_tokens_total", "Prompt tokens predicted to be cached when placed.", ["instance"]
)
CACHE_PREDICTIONS = Counter(
    "pointsman_cache_predictions_total",
    "Finished requests by how many cached tokens the engine reports: equal to those predicted, fewer, more, or unknown.",
    ["instance", "outcome"],
)
ENGINE_RETRIES = Counter(
    "pointsman_engine_retries_total", "Requests sent elsewhere because an engine failed before its first byte."
)
RETRIES_REFUSED = Counter(
    "pointsman_engine_retries_refused_total", "Further attempts that the retry budget did not allow."
)
ATTEMPT_FAILURES = Counter(
    "pointsman_attempt_failures_total",
    "Requests that an engine failed, by how, whether or not they were tried elsewhere.",
    ["instance", "failure"],
)
INGRESS_PENDING_REQUESTS = Gauge(
    "pointsman_ingress_pending_requests",
    "Requests that wait in the ingress because no engine can be asked yet.",
    multiprocess_mode="livesum",
)
TOKENIZATION_SECONDS = Histogram(
    "pointsman_tokenization_seconds",
    "Wall time to turn a body into tokens.",
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
)
FALLBACK_PLACEMENTS = Counter(
    "pointsman_fallback_placements_total", "Requests that the ingress placed itself because no scheduler answered."
)

ACCESS_LOG_LINES_DROPPED = Counter(
    "pointsman_access_log_lines_dropped_total",
    "Access log lines dropped because standard output was read too slowly.",
)

SPANS_DROPPED = Counter(
    "pointsman_spans_dropped_total",
    "Spans that no collector got, by why: queue_full or not_exported.",
    ["reason"],
)

DECISIONS = Counter("pointsman_decisions_total", "Placement decisions, by policy and outcome.", ["policy", "outcome"])
DECISION_SECONDS = Histogram(
    "pointsman_decision_seconds",
    "Wall time to decide one placement.",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05),
)
LEADER = Gauge("pointsman_leader", "Whether this scheduler may decide.")
LEADER_TERM = Gauge("pointsman_leader_term", "Newest term in the log.")
INSTANCE_PENDING = Gauge("pointsman_instance_pending_requests", "Requests waiting in our queue.", ["instance"])
INSTANCE_PREFILL = Gauge(
    "pointsman_instance_prefill_requests", "Requests granted, before their first token.", ["instance"]
)
INSTANCE_DECODING = Gauge("pointsman_instance_decoding_requests", "Requests after their first token.", ["instance"])
INSTANCE_BLOCKS = Gauge(
    "pointsman_instance_cached_blocks", "Blocks that the index holds for the instance.", ["instance"]
)
INSTANCE_PREDICTION_ERROR = Gauge(
    "pointsman_instance_prediction_error_ratio",
    "Median absolute error of the newest 100 prefill predictions, as a share of what was observed; 0 before there is one.",
    ["instance"],
)
INSTANCE_CACHE_KNOWLEDGE = Gauge(
    "pointsman_instance_cache_knowledge", "1 for how well the instance's cache is known: exact, degraded, blind.",
    ["instance", "knowledge"],
)  # fmt: skip
ENGINE_URLS_REFUSED = Counter(
    "pointsman_engine_urls_refused_total", "Joins and requests refused because --engine-urls does not cover the URL."
)
INSTANCE_EJECTED = Gauge(
    "pointsman_instance_ejected", "1 while the instance is ejected or tried again, 0 while it is whole.", ["instance"]
)
INSTANCE_EJECTIONS = Counter(
    "pointsman_instance_ejections_total",
    "Times that this leader ejected the instance, by cause.",
    ["instance", "cause"],
)
POOL_INSTANCES = Gauge("pointsman_pool_instances", "Instances of the pool as the scaler counts them.", ["status"])
POOL_DESIRED = Gauge("pointsman_pool_desired_instances", "Instances that the newest scaling decision wants.")
SCALER_ERRORS = Counter(
    "pointsman_scaler_errors_total", "Times that the scaler could not do what was decided: provider, leader or log."
)
CACHE_RESYNCS = Counter(
    "pointsman_cache_resyncs_total", "Snapshots asked for because knowledge differed.", ["instance"]
)

MIGRATIONS = Counter(
    "pointsman_migrations_total", "Moves that rebalancers asked for, by what the leader made of them.", ["outcome"]
)
REDISPATCHES_ORDERED = Counter(
    "pointsman_redispatches_ordered_total", "Requests taken out of an engine before their first token, by this leader."
)
REDISPATCH_WASTED_PREFILL_SECONDS = Counter(
    "pointsman_redispatch_wasted_prefill_seconds_total",
    "Prefill, engine seconds, that engines are thought to have done for requests that were then taken out of them.",
)
REQUESTS_REDISPATCHED = Counter(
    "pointsman_requests_redispatched_total", "Requests that this ingress aborted at one engine and sent to another."
)
MIGRATION_PLANS = Counter(
    "pointsman_migration_plans_total", "Plans that this rebalancer sent, by policy and answer.", ["policy", "outcome"]
)
MIGRATIONS_PLANNED = Counter(
    "pointsman_migrations_planned_total", "Moves in the plans that this rebalancer sent.", ["policy"]
)
MIGRATION_PLANNING_SECONDS = Histogram(
    "pointsman_migration_planning_seconds",
    "Wall time to plan one round of migrations, empty rounds included.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
)
REBALANCING_REACTION_SECONDS = Histogram(
    "pointsman_rebalancing_reaction_seconds",
    "Wall time from the event that a plan answers to the moves being made.",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)

LOG_APPENDED = Counter("pointsman_log_events_appended_total", "Events written to the log.", ["type"])
LOG_LOST = Counter("pointsman_log_events_lost_total", "Events that could not be written for good.")
LOG_WRITES_STALLED = Gauge(
    "pointsman_log_writes_stalled", "1 while the log is reached and confirms no write: is its disk full?"
)
DEAD_LETTERS = Counter(
    "pointsman_dead_letters_total",
    "Messages without an effect here, by why: undecodable, or unapplied because the fold failed on them.",
    ["kind"],
)
UNEXPECTED_ERRORS = Counter(
    "pointsman_unexpected_errors_total", "Commands and regular steps that ended in an unexpected error.", ["step"]
)
LOG_RESETS = Counter("pointsman_log_resets_total", "Times that reading had to start again from what is left.")
NATS_FORBIDDEN = Counter(
    "pointsman_nats_forbidden_total",
    "Refusals of the nats-server for want of permission, by operation: publish or subscription.",
    ["operation"],
)
NATS_CONNECTED = Gauge("pointsman_nats_connected", "1 while connected to NATS.", multiprocess_mode="livemin")
DEGRADED = Gauge(
    "pointsman_degraded", "1 while this part of the process is missing or degraded, as on /readyz.", ["part"]
)

ENGINE_EVENTS = Counter("pointsman_engine_events_total", "Engine cache events read, by type.", ["type"])
ENGINE_EVENTS_UNDECODABLE = Counter("pointsman_engine_events_undecodable_total", "Engine messages not understood.")
ENGINE_EVENT_GAPS = Counter(
    "pointsman_engine_event_gaps_total", "Gaps in the engine's events, by whether replay filled them.", ["outcome"]
)
ENGINE_STORES_DROPPED = Counter(
    "pointsman_engine_stores_dropped_total",
    "Stores, or blocks of them, that contradict the engine's block size or follow a block that was never stored.",
)
ENGINE_BLOCKS_EXPIRED = Counter(
    "pointsman_engine_blocks_expired_total", "Engine blocks no longer believed in because nothing confirmed them."
)
RECORDER_ARCHIVED_SEQUENCE = Gauge("pointsman_recorder_archived_sequence", "Last log sequence archived in SQL.")


def metrics_page() -> bytes:
    if METRICS_DIRECTORY not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def configure_logging(level: str, log_format: str) -> None:
    """Logs on standard error: `event key=value ...`, or one JSON object per line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)
    )
    structlog.configure(
        processors=[
            LogPace(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _LossyErrors())),
        cache_logger_on_first_use=True,
    )


def _printable(_logger: object, _name: str, event: EventDict) -> EventDict:
    """The text renderer quotes only values with blanks; a traceback has lines, and quotes what others sent."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n")[:TRACEBACK_LINES_MAX] if name == "exception" else [value]
            event[name] = "\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines)
    return event


class _LossyErrors:
    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


__all__ = ["REGISTRY", "configure_logging"]
