"""All metrics, by pool unless their labels are named. Seconds are engine time (wall time at `--speed 1`) unless the help says wall.
`docs/monitoring.md` lists them; a test compares."""

from functools import partial
from importlib.metadata import version
from typing import Literal, get_args

from pointsman.contracts.fleet import EjectionCause, Role
from pointsman.contracts.overlap import OverlapRefusal
from pointsman.contracts.reasons import MoveRefusal, PlanRefusal, RejectReason
from pointsman.contracts.requests import AttemptFailure
from pointsman.runtime import bounded_metrics
from pointsman.runtime.bounded_metrics import Counter, Histogram
from pointsman.state.fleet import Knowledge, Status

Step = Literal[
    "api_keys", "columns", "command", "console_job", "console_page", "discovery", "engine", "fleet_view", "gauges", "key_check", "liveness",
    "log_entry", "lost requests", "outliers", "overlap", "overload", "plan", "planning", "probe", "reaction", "relocation", "request",
    "resync", "scaling", "tenant policies",
]  # fmt: skip
"""What is contained when it raises, in any process. Each shows all: the first error must be an increase."""
ConnectionRefusal = Literal[
    "malformed", "pipelined", "head_too_large", "head_timeout", "connections", "connections_per_address", "idle_evicted",
    "opening_evicted", "answer_unread",
]  # fmt: skip
UnusableCheckpoints = Literal[
    "another fold version", "an earlier release", "other policies or settings", "unreadable", "unavailable"
]

Gauge = partial(bounded_metrics.Gauge, multiprocess_mode="livemax")
"""The maximum over processes; counters and histograms are summed."""

TTFT_BUCKETS_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TPOT_BUCKETS_SECONDS = (
    0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
E2E_BUCKETS_SECONDS = (
    0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
)  # fmt: skip
QUEUE_BUCKETS_SECONDS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip

# Ingress. `pool` and `model` are empty for requests that named no known model.

HTTP_REQUESTS = Counter(
    "pointsman_http_requests_total",
    "Client requests to the API that ended, by path and HTTP status; 499: the client hung up before an answer.",
    ["pool", "model", "route", "status"],
)
REQUEST_ERRORS = Counter(
    "pointsman_request_errors_total",
    "Client requests that were rejected, failed, timed out or were cancelled, by reason.",
    ["pool", "model", "reason"],
)
REQUESTS_IN_FLIGHT = Gauge(
    "pointsman_requests_in_flight",
    "Requests that this ingress has accepted and not ended: queued, or being answered by an engine.",
    ["pool", "model"],
    multiprocess_mode="livesum",
)
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "pointsman_time_to_first_token_seconds",
    "From a request's arrival to its first token (to the whole answer if it is not streamed), of finished requests.",
    ["pool", "model"],
    buckets=TTFT_BUCKETS_SECONDS,
)
TIME_PER_OUTPUT_TOKEN_SECONDS = Histogram(
    "pointsman_time_per_output_token_seconds",
    "Mean time between the output tokens of a stream, of finished requests.",
    ["pool", "model"],
    buckets=TPOT_BUCKETS_SECONDS,
)
E2E_REQUEST_LATENCY_SECONDS = Histogram(
    "pointsman_e2e_request_latency_seconds",
    "From a request's arrival to the end of its answer, of finished requests.",
    ["pool", "model"],
    buckets=E2E_BUCKETS_SECONDS,
)
REQUEST_QUEUE_TIME_SECONDS = Histogram(
    "pointsman_request_queue_time_seconds",
    "From a request's arrival until it was sent to the engine that answered it, of finished requests.",
    ["pool", "model"],
    buckets=QUEUE_BUCKETS_SECONDS,
)
SLO_REQUESTS = Counter(
    "pointsman_slo_requests_total",
    "Finished requests by whether they met their SLO (objective ttft, tpot, or tbt: the slowest tenth of the gaps between "
    "tokens, against the TPOT SLO).",
    ["pool", "model"],
    values={"objective": ("ttft", "tpot", "tbt"), "outcome": ("met", "missed")},
)
PROMPT_TOKENS = Counter(
    "pointsman_prompt_tokens_total",
    "Prompt tokens of finished requests, as engines report them.",
    ["pool", "model", "engine"],
)
OUTPUT_TOKENS = Counter(
    "pointsman_output_tokens_total",
    "Output tokens of finished requests, as engines report them.",
    ["pool", "model", "engine"],
)
CACHED_TOKENS = Counter(
    "pointsman_cached_tokens_total",
    "Prompt tokens that the engine took from its KV cache, as it reports them.",
    ["pool", "model", "engine"],
)
PREDICTED_CACHED_TOKENS = Counter(
    "pointsman_predicted_cached_tokens_total",
    "Prompt tokens of finished requests that were expected in the KV cache of the chosen engine.",
    ["pool", "model", "engine"],
)
CACHE_PREDICTIONS = Counter(
    "pointsman_cache_predictions_total",
    "Finished requests by the cached tokens that the engine reports: as predicted (equal), fewer, more, or unknown.",
    ["pool", "engine"],
    values={"outcome": ("equal", "fewer", "more", "unknown")},
)
ENGINE_FAILURES = Counter(
    "pointsman_engine_failures_total",
    "Times that an engine failed a request, by how, whether or not another engine answered it.",
    ["pool", "engine"],
    values={"failure": get_args(AttemptFailure)},
)
HANDOVERS_WITHOUT_TRANSFER = Counter(
    "pointsman_handovers_without_transfer_total",
    "Prefills after which the engine named no KV cache that the decode engine could fetch.",
    ["pool", "engine"],
)
REQUEST_RETRIES = Counter("pointsman_request_retries_total", "Requests sent to another engine because one had failed.")
REQUEST_RETRIES_REFUSED = Counter(
    "pointsman_request_retries_refused_total", "Retries that the retry budget did not allow."
)
PREFIX_COPIES = Counter(
    "pointsman_prefix_copies_total",
    "Hot prefixes that this ingress had an engine take from another ahead of need: made, or failed.",
    ["pool", "engine"],
    values={"outcome": ("made", "failed")},
)
REQUESTS_REDISPATCHED = Counter(
    "pointsman_requests_redispatched_total",
    "Requests that this ingress aborted at one engine and sent to another, by order of the leading scheduler.",
)
INGRESS_HELD_REQUESTS = Gauge(
    "pointsman_ingress_held_requests",
    "Requests that wait in the ingress because no scheduler can be asked and no engine is known.",
    [],
    multiprocess_mode="livesum",
)
FALLBACK_PLACEMENTS = Counter(
    "pointsman_fallback_placements_total",
    "Requests that the ingress sent to the least loaded engine because no scheduler answered.",
)
TOKENIZATION_SECONDS = Histogram(
    "pointsman_tokenization_seconds",
    "Wall time to turn a request into tokens.",
    [],
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
)
HTTP_CONNECTIONS_REFUSED = Counter(
    "pointsman_http_connections_refused_total",
    "Connections closed before a request, or because the client did not read its answer, by reason.",
    [],
    values={"reason": get_args(ConnectionRefusal)},
)
ACCESS_LOG_LINES_DROPPED = Counter(
    "pointsman_access_log_lines_dropped_total",
    "Access log lines dropped because standard output was read too slowly.",
    [],
)

SPANS_DROPPED = Counter(
    "pointsman_spans_dropped_total",
    "Spans that no collector got, by why: queue_full or not_exported.",
    [],
    values={"reason": ("queue_full", "not_exported")},
)

# Scheduler. Every scheduler shows the gauges of engines, the follower with some delay: take the maximum.

DECISIONS = Counter(
    "pointsman_decisions_total",
    "Placement decisions by policy and outcome: placed, or the reason of the rejection.",
    ["pool", "policy"],
    values={"outcome": ("placed", *RejectReason)},
)
DECISION_SECONDS = Histogram(
    "pointsman_decision_seconds",
    "Wall time to decide one placement.",
    buckets=(0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.05),
)
OVERLAP_REQUESTS = Counter(
    "pointsman_overlap_requests_total",
    "Requests of cmd.overlap, by outcome: answered, or the reason of the refusal.",
    values={"outcome": ("answered", *OverlapRefusal)},
)
OVERLAP_SECONDS = Histogram(
    "pointsman_overlap_seconds",
    "CPU time that a scheduler worked on a request of cmd.overlap, refused ones included.",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05),
)
LEADER = Gauge("pointsman_leader", "1 if this scheduler leads its pool, else 0.")
LEADER_TERM = Gauge("pointsman_leader_term", "Number of the newest election that this scheduler has read.")
POOL_INFO = Gauge(
    "pointsman_pool_info",
    "Always 1: the model that the pool serves and the policies that place its requests.",
    ["pool", "model", "policy", "admission", "ordering"],
)
ENGINES = Gauge("pointsman_engines", "Engines of the pool by status.", values={"status": Status})
ENGINE_ROLES = Gauge(
    "pointsman_engine_roles", "Ready engines by what they do: both, prefill or decode.", values={"role": get_args(Role)}
)
ROLE_CHANGES = Counter(
    "pointsman_role_changes_total", "Engines that took another role, by that role.", values={"role": get_args(Role)}
)
HELD_REQUESTS = Gauge("pointsman_held_requests", "Requests that wait because no ready engine can serve them.")
ENGINE_PENDING = Gauge(
    "pointsman_engine_pending_requests", "Requests that wait in the scheduler for this engine.", ["pool", "engine"]
)
ENGINE_PREFILL = Gauge(
    "pointsman_engine_prefill_requests", "Requests at the engine, before their first token.", ["pool", "engine"]
)
ENGINE_DECODING = Gauge(
    "pointsman_engine_decoding_requests", "Requests at the engine, after their first token.", ["pool", "engine"]
)
ENGINE_KV_CACHE_USAGE = Gauge(
    "pointsman_engine_kv_cache_usage_ratio", "Share of its KV cache that the engine reports in use.", ["pool", "engine"]
)
ENGINE_CACHED_BLOCKS = Gauge(
    "pointsman_engine_cached_blocks", "KV blocks that the index holds for the engine.", ["pool", "engine"]
)
ENGINE_PREDICTION_ERROR = Gauge(
    "pointsman_engine_prediction_error_ratio",
    "Median error of the newest 100 predictions of prefill time, as a share of the time observed; 0 before the first.",
    ["pool", "engine"],
)
TTFT_UPPER_COVERAGE = Gauge(
    "pointsman_ttft_upper_coverage_ratio",
    "Share of about the newest 500 first tokens within the upper value of their predicted TTFT; 0 before the first.",
)
ENGINE_CACHE_KNOWLEDGE = Gauge(
    "pointsman_engine_cache_knowledge",
    "1 for how well the engine's cache is known (exact, degraded or blind), 0 for the other two.",
    ["pool", "engine"],
    values={"knowledge": Knowledge},
)
ENGINE_EJECTED = Gauge(
    "pointsman_engine_ejected",
    "1 while the engine is ejected as an outlier, or gets single requests on trial after that; else 0.",
    ["pool", "engine"],
)
ENGINE_EJECTIONS = Counter(
    "pointsman_engine_ejections_total",
    "Times that this scheduler ejected the engine, by cause.",
    ["pool", "engine"],
    values={"cause": get_args(EjectionCause)},
)
CACHE_RESYNCS = Counter(
    "pointsman_cache_resyncs_total",
    "Snapshots of the engine's cache that this scheduler asked its worker for.",
    ["pool", "engine"],
)
MIGRATIONS = Counter(
    "pointsman_migrations_total",
    "Moves of waiting requests that rebalancers asked for: applied, or the reason of the refusal.",
    values={"outcome": ("applied", *MoveRefusal)},
)
REDISPATCHES_ORDERED = Counter(
    "pointsman_redispatches_ordered_total",
    "Requests that this scheduler took out of an engine before their first token.",
)
REDISPATCH_WASTED_PREFILL_SECONDS = Counter(
    "pointsman_redispatch_wasted_prefill_seconds_total",
    "Prefill time that engines are thought to have spent on requests that were then taken out of them.",
)
ENGINE_URLS_REFUSED = Counter(
    "pointsman_engine_urls_refused_total",
    "Joins and requests refused because --engine-urls does not cover the URL.",
    [],
)

# Worker

WORKER_ENGINES = Gauge(
    "pointsman_worker_engines",
    "Engines that this worker follows, by status: serving, not_serving, withheld (its source says not ready, or names it no "
    "more), failed (cannot be followed).",
    values={"status": ("serving", "not_serving", "withheld", "failed")},
)
KV_EVENTS = Counter(
    "pointsman_kv_events_total", "KV cache events read from the engine, by type.", ["pool", "engine", "type"]
)
KV_EVENTS_LAG_SECONDS = Gauge(
    "pointsman_kv_events_lag_seconds",
    "Wall time from the date that the engine gave its newest batch of KV cache events until the worker read it; not of replayed "
    "ones. Dates are of the engine's clock: a difference from the worker's is in it, and below 0 it is 0.",
    ["pool", "engine"],
)
KV_EVENTS_UNDECODABLE = Counter(
    "pointsman_kv_events_undecodable_total", "KV cache events of the engine not understood.", ["pool", "engine"]
)
KV_EVENT_GAPS = Counter(
    "pointsman_kv_event_gaps_total",
    "Gaps in the engine's KV cache events: replayed (filled by the replay endpoint) or lost.",
    ["pool", "engine"],
    values={"outcome": ("replayed", "lost")},
)
KV_STORES_DROPPED = Counter(
    "pointsman_kv_stores_dropped_total",
    "Stored blocks that were ignored: they contradict the engine's block size, or follow an unknown block. Events of a batch "
    "that is too much work.",
    ["pool", "engine"],
)
KV_BLOCKS_EXPIRED = Counter(
    "pointsman_kv_blocks_expired_total", "Blocks forgotten because no event confirmed them in time.", ["pool", "engine"]
)

# Scaler and rebalancer

SCALER_DESIRED_ENGINES = Gauge("pointsman_scaler_desired_engines", "Engines that the newest scaling decision wants.")
SCALER_DESIRED_ROLES = Gauge(
    "pointsman_scaler_desired_roles",
    "Engines of each role that the newest decision about a split pool wants.",
    values={"role": ("prefill", "decode")},
)
SCALER_ERRORS = Counter(
    "pointsman_scaler_errors_total",
    "Times that the scaler could not carry out a decision: provider, leader or log failed.",
)
MIGRATION_PLANS = Counter(
    "pointsman_migration_plans_total",
    "Plans that this rebalancer sent, by policy and answer.",
    ["pool", "policy"],
    values={"outcome": ("taken", *PlanRefusal, "unanswered")},
)
MIGRATIONS_PLANNED = Counter(
    "pointsman_migrations_planned_total", "Moves in the plans that this rebalancer sent.", ["pool", "policy"]
)
MIGRATION_PLANNING_SECONDS = Histogram(
    "pointsman_migration_planning_seconds",
    "Wall time to plan one round of moves, empty rounds included.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
)
REBALANCING_REACTION_SECONDS = Histogram(
    "pointsman_rebalancing_reaction_seconds",
    "Wall time from the event that a plan answers until its moves were made.",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)

# Console

HIT_RATE_LADDER_PROMPT_TOKENS = Counter(
    "pointsman_hit_rate_ladder_prompt_tokens_total",
    "Prompt tokens of finished requests that the hit-rate ladder counts.",
)
HIT_RATE_LADDER_TOKENS = Counter(
    "pointsman_hit_rate_ladder_tokens_total",
    "Those of them that were cached, or could have been, by rung of the ladder.",
    values={"rung": ("unbounded", "capacity", "perfect", "known", "chosen", "delivered")},
)

SHADOW_DECISIONS = Counter(
    "pointsman_shadow_decisions_total",
    "Placements and rejections that a shadow policy decided too, by agreement with the policy in force.",
    ["pool", "shadow"],
    values={"agreement": ("same", "other", "shadow_rejects", "shadow_places", "both_reject")},
)
SHADOW_PROMPT_TOKENS = Counter(
    "pointsman_shadow_prompt_tokens_total", "Prompt tokens of requests that both policies placed.", ["pool", "shadow"]
)
SHADOW_CACHED_TOKENS = Counter(
    "pointsman_shadow_cached_tokens_total",
    "Those of them predicted as cached at the instance chosen by the policy in force (running) and by the shadow.",
    ["pool", "shadow"],
    values={"side": ("running", "shadow")},
)
SHADOW_PREDICTED_TTFT = Counter(
    "pointsman_shadow_predicted_ttft_seconds_total",
    "Predicted TTFT of those requests, from the decision, at the instances that the two policies chose.",
    ["pool", "shadow"],
    values={"side": ("running", "shadow")},
)
SHADOW_SAMPLED_OUT = Counter(
    "pointsman_shadow_decisions_sampled_out_total",
    "Placements that shadow policies did not decide, because there were too many.",
)
SHADOW_WINDOWS = Counter(
    "pointsman_shadow_windows_total",
    "Windows of arrivals: simulated, shed because simulating was behind, or unusable.",
    values={"outcome": ("simulated", "shed", "unusable")},
)
SHADOW_WINDOW_TTFT = Gauge(
    "pointsman_shadow_window_ttft_seconds",
    "TTFT of the last simulated window, under the policy in force and under the shadow.",
    ["pool", "shadow"],
    values={"side": ("running", "shadow"), "quantile": ("0.5", "0.9")},
)
SHADOW_WINDOW_HIT_RATE = Gauge(
    "pointsman_shadow_window_hit_rate",
    "Share of prompt tokens found cached in the last simulated window.",
    ["pool", "shadow"],
    values={"side": ("running", "shadow")},
)
SHADOW_WINDOW_GOODPUT = Gauge(
    "pointsman_shadow_window_goodput",
    "Requests on time per engine second of the last simulated window.",
    ["pool", "shadow"],
    values={"side": ("running", "shadow")},
)
SHADOW_WINDOW_REGRET = Gauge(
    "pointsman_shadow_window_regret_seconds",
    "Mean TTFT that the policy in force costs more than the shadow, per request of the last simulated window.",
    ["pool", "shadow"],
)

# Log and NATS: every service, the `pool` of the log

LOG_APPENDED = Counter("pointsman_log_events_appended_total", "Events written to the log, by type.", ["pool", "type"])
LOG_LOST = Counter("pointsman_log_events_lost_total", "Events that could not be written and are lost.")
LOG_WRITES_STALLED = Gauge("pointsman_log_writes_stalled", "1 while NATS is connected but confirms no write; else 0.")
LOG_WRITE_LOAD = Gauge(
    "pointsman_log_write_load_ratio",
    "How near unconfirmed writes are to being lost, by number, bytes or time; from 0.5 on a leader refuses requests.",
)
REQUEST_WAIT = Histogram(
    "pointsman_scheduler_request_wait_seconds",
    "Time that a request waited in the leader's process for its turn to be decided.",
    buckets=(0.01, 0.05, 0.25, 0.5, 1.0, 2.0, 5.0),
)
SCHEDULER_REFUSED = Counter(
    "pointsman_scheduler_requests_refused_total",
    "Requests that this scheduler refused undecided: the log did not keep up (log_overloaded), or it did not itself.",
    values={"reason": (RejectReason.LOG_OVERLOADED, RejectReason.SCHEDULER_OVERLOADED)},
)
LOG_LAG = Gauge("pointsman_log_lag_entries", "Log entries that this process has not read yet (recorder: not archived).")
LOG_FIRST_SEQUENCE = Gauge("pointsman_log_first_sequence", "Sequence of the oldest entry that the log keeps.")
LOG_LAST_SEQUENCE = Gauge("pointsman_log_last_sequence", "Sequence of the newest log entry.")
LOG_FOLDED_WHOLE = Counter(
    "pointsman_log_folded_whole_total",
    "Starts that folded the whole log because its checkpoints are of another fold, or could not be read.",
    values={"reason": get_args(UnusableCheckpoints)},
)
CHECKPOINT_AGE = Gauge(
    "pointsman_checkpoint_age_entries",
    "Log entries after the newest checkpoint from which this scheduler could start; without one, all.",
)
LOG_BYTES = Gauge("pointsman_log_bytes", "Bytes that the log's stream holds.")
LOG_BYTES_LIMIT = Gauge(
    "pointsman_log_bytes_limit", "Bytes at which the log's stream drops its oldest entries; 0: no limit."
)
LOG_COPIES_BEHIND = Gauge(
    "pointsman_log_copies_behind", "nats-servers whose copy of the log lacks the newest entries, or that are away."
)
LOG_RESETS = Counter(
    "pointsman_log_resets_total",
    "Times that reading started again because the log was recreated, cut, or dropped unread entries.",
)
DEAD_LETTERS = Counter(
    "pointsman_dead_letters_total",
    "Log entries and messages without effect: undecodable, or unapplied because of a defect.",
    values={"kind": ("undecodable", "unapplied")},
)
RECORDER_ARCHIVED_SEQUENCE = Gauge(
    "pointsman_recorder_archived_sequence", "Sequence of the newest log entry in the archive."
)
ARCHIVE_BYTES = Gauge(
    "pointsman_recorder_archive_bytes",
    "Bytes of the archive: used by entries (what --archive-bytes-max bounds), and on disk with space that is free again.",
    values={"kind": ("used", "disk")},
)
ARCHIVE_OLDEST_SECONDS = Gauge("pointsman_recorder_archive_oldest_seconds", "Age of the oldest event in the archive.")
ARCHIVE_PRUNED = Counter("pointsman_recorder_archive_pruned_total", "Entries that retention removed from the archive.")
NATS_CONNECTED = Gauge("pointsman_nats_connected", "1 while connected to NATS, else 0.", multiprocess_mode="livemin")
NATS_FORBIDDEN = Counter(
    "pointsman_nats_forbidden_total",
    "Subjects that the nats-server refused to this process, by operation: publish or subscription.",
    values={"operation": ("publish", "subscription")},
)

# Every service

DEGRADED = Gauge(
    "pointsman_degraded",
    "1 while this part of the process is missing or degraded (/readyz says why), else 0.",
    ["pool", "part"],
)
UNEXPECTED_ERRORS = Counter(
    "pointsman_unexpected_errors_total",
    "Commands and regular steps that ended in an unexpected error.",
    [],
    values={"step": get_args(Step)},
)
BUILD_INFO = Gauge("pointsman_build_info", "Always 1: the version of this process.", ["version"])


def show_process() -> None:
    """What every process shows from its start."""
    BUILD_INFO.labels(version("pointsman")).set(1)
    UNEXPECTED_ERRORS.show_zeros()
