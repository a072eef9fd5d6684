"""Writes the Grafana dashboards beside this file, in dashboards/: `make dashboards`. A test compares them with what this
writes, and runs every query against a real Prometheus. Each panel asks for one pool or all ($pool)."""

import sys
from functools import partial
from pathlib import Path
from typing import Literal

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model

OUT = Path(__file__).parent / "dashboards"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
Query = tuple[str, str]
"""PromQL and legend."""
Kind = Literal["lines", "stacked", "stat", "heatmap"]


class Panel:
    def __init__(
        self,
        title: str,
        description: str,
        *queries: Query,
        unit: str = "short",
        kind: Kind = "lines",
        width: int = 8,
        red_above: float | None = None,
        red_below: float | None = None,
    ) -> None:
        """`width`: in columns of the grid. `red_above`, `red_below`: of a stat."""
        self.title = title
        self.description = description
        self.queries = queries
        self.unit = unit
        self.kind = kind
        self.width, self.height = (4, 4) if kind == "stat" else (width, 8)
        self.red_above = red_above
        self.red_below = red_below


Stat, Stacked = partial(Panel, kind="stat"), partial(Panel, kind="stacked")


class Row:
    def __init__(self, title: str, *panels: Panel) -> None:
        self.title = title
        self.panels = panels


class Board:
    def __init__(self, uid: str, title: str, description: str, *rows: Row, has_model: bool = False) -> None:
        self.uid = uid
        self.title = title
        self.description = description
        self.rows = rows
        self.has_model = has_model


REQUESTS = 'pool=~"$pool",model=~"$model"'
POOL = 'pool=~"$pool"'
READY = POOL + ',status="ready"'
SAME = ',agreement=~"same|both_reject"'


def rate(metric: str, labels: str = POOL, by: str = "") -> str:
    per = f" by ({by})" if by else ""
    return f"sum{per} (rate({metric}{{{labels}}}[$__rate_interval]))"


def events(metric: str, during: str, by: str = "") -> str:
    """What a counter counted. Of a young series all: for `increase` its first value is no event, but an engine's series
    appear with the first one, and a process may count before it is first read."""
    per, counter = f" by ({by})" if by else "", f"{metric}{{{POOL}}}"
    return f"sum{per} (({counter} unless {counter} offset {during}) or increase({counter}[{during}]))"


def highest(metric: str, by: str, labels: str = POOL) -> str:
    """Every scheduler shows the pool: the maximum of them."""
    return f"max by ({by}) ({metric}{{{labels}}})"


def rates(metric: str, by: str, labels: str = POOL) -> Query:
    return rate(metric, labels, by), legend(by)


def counts(metric: str, during: str, by: str) -> Query:
    return events(metric, during, by), legend(by)


def levels(metric: str, by: str, labels: str = POOL) -> Query:
    return highest(metric, by, labels), legend(by)


def legend(by: str) -> str:
    """Of these labels; an engine's name says its pool, too."""
    labels = by.split(", ")
    return " ".join(f"{{{{{label}}}}}" for label in labels if label != "pool" or "engine" not in labels)


def quantiles(metric: str, labels: str = POOL) -> list[Query]:
    buckets = rate(f"{metric}_bucket", labels, "le")
    return [(f"histogram_quantile({q / 100:.2g}, {buckets})", f"P{q}") for q in (50, 90, 99)]


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


FIVE_HUNDREDS = rate("pointsman_http_requests_total", REQUESTS + ',status=~"5.."')
ALL_REQUESTS = rate("pointsman_http_requests_total", REQUESTS)
FINISHED_1H, MISSED_1H = (
    f"sum by (pool, model, objective) (increase(pointsman_slo_requests_total{{{labels}}}[1h]))"
    for labels in (REQUESTS, REQUESTS + ',outcome="missed"')
)
PROMPT, CACHED = "pointsman_prompt_tokens_total", "pointsman_cached_tokens_total"
LADDER, LADDER_PROMPT = "pointsman_hit_rate_ladder_tokens_total", "pointsman_hit_rate_ladder_prompt_tokens_total"

OVERVIEW = Board(
    "pointsman-overview",
    "Pointsman / Overview",
    "What clients get: requests, errors, latencies and SLOs.",
    Row(
        "Now",
        Stat("Requests", "Requests that ended, per second.", (ALL_REQUESTS, ""), unit="reqps"),
        Stat("In flight", "Queued or being answered.", (f"sum (pointsman_requests_in_flight{{{REQUESTS}}})", "")),
        Stat(
            "Server errors",
            "Share of requests that got a 5xx. A stream that breaks off is under Errors by reason.",
            (f"({FIVE_HUNDREDS} or vector(0)) / ({ALL_REQUESTS} > 0)", ""),
            unit="percentunit",
            red_above=0.05,
        ),
        Stat(
            "TTFT SLO met",
            "Share of finished requests whose first token came in time. The objective of the alerts is 99%.",
            (
                ratio(
                    rate("pointsman_slo_requests_total", REQUESTS + ',objective="ttft",outcome="met"'),
                    rate("pointsman_slo_requests_total", REQUESTS + ',objective="ttft"'),
                ),
                "",
            ),
            unit="percentunit",
            red_below=0.99,
        ),
        Stat(
            "Cache hit rate",
            "Share of prompt tokens that engines took from their KV cache.",
            (ratio(rate(CACHED, REQUESTS), rate(PROMPT, REQUESTS)), ""),
            unit="percentunit",
        ),
        Stat(
            "Ready engines",
            "As the scheduler sees them.",
            (f"sum ({highest('pointsman_engines', 'pool', READY)})", ""),
            red_below=1,
        ),
    ),
    Row(
        "Traffic",
        Stacked(
            "Requests by status",
            "499: the client hung up. 429: rejected. 5xx: failed.",
            rates("pointsman_http_requests_total", "status", REQUESTS),
            unit="reqps",
        ),
        Stacked(
            "Errors by reason",
            "Requests that were not served whole. Runbook: PointsmanErrors, PointsmanRejections.",
            rates("pointsman_request_errors_total", "reason", REQUESTS),
            unit="reqps",
        ),
        Stacked(
            "Tokens",
            "Prompt tokens computed and taken from the cache, and output tokens.",
            (f"{rate(PROMPT, REQUESTS)} - {rate(CACHED, REQUESTS)}", "prompt, computed"),
            (rate(CACHED, REQUESTS), "prompt, cached"),
            (rate("pointsman_output_tokens_total", REQUESTS), "output"),
            unit="tok/s",
        ),
        Stacked(
            "In flight by model",
            "Queued or being answered.",
            (f"sum by (pool, model) (pointsman_requests_in_flight{{{REQUESTS}}})", "{{pool}} {{model}}"),
        ),
        Stacked(
            "Requests by model",
            "Those without a model named none that is known.",
            rates("pointsman_http_requests_total", "pool, model", REQUESTS),
            unit="reqps",
        ),
        Panel(
            "Degraded parts",
            "1: missing or degraded, as on /readyz. Empty is good; shutdown is normal.",
            (f"sum by (job, pool, part) (pointsman_degraded{{{POOL}}}) > 0", "{{job}} {{part}} ({{pool}})"),
        ),
    ),
    Row(
        "Latency",
        Panel(
            "Time to first token",
            "From arrival to the first token.",
            *quantiles("pointsman_time_to_first_token_seconds", REQUESTS),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "Mean of each stream after its first token.",
            *quantiles("pointsman_time_per_output_token_seconds", REQUESTS),
            unit="s",
        ),
        Panel(
            "Queue time",
            "From arrival until the request was sent to the engine that answered.",
            *quantiles("pointsman_request_queue_time_seconds", REQUESTS),
            unit="s",
        ),
        Panel(
            "Request latency",
            "From arrival to the end of the answer.",
            *quantiles("pointsman_e2e_request_latency_seconds", REQUESTS),
            unit="s",
        ),
        Panel(
            "TTFT distribution",
            "Requests per second in each range of TTFT.",
            rates("pointsman_time_to_first_token_seconds_bucket", "le", REQUESTS),
            unit="s",
            width=16,
            kind="heatmap",
        ),
    ),
    Row(
        "SLO",
        Panel(
            "SLO met, by model",
            "Finished requests that met their objective. Rejected requests do not count.",
            (
                ratio(
                    rate("pointsman_slo_requests_total", REQUESTS + ',outcome="met"', "pool, model, objective"),
                    rate("pointsman_slo_requests_total", REQUESTS, "pool, model, objective"),
                ),
                "{{objective}} {{pool}} {{model}}",
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Error budget burn rate",
            "1: an objective of 99% is just met. Alerts fire at 14.4 (one hour) and 6 (six hours).",
            (f"{MISSED_1H} / ({FINISHED_1H} > 0) / 0.01", "{{objective}} {{pool}} {{model}}"),
            width=12,
        ),
    ),
    has_model=True,
)

CACHE = Board(
    "pointsman-cache",
    "Pointsman / Cache and routing",
    "What is known of the engines' caches, what was predicted, and what engines delivered.",
    Row(
        "Hits",
        Panel(
            "Hit rate",
            "Share of prompt tokens from the KV cache: as predicted at placement, and as engines report.",
            (ratio(rate("pointsman_predicted_cached_tokens_total"), rate(PROMPT)), "predicted"),
            (ratio(rate(CACHED), rate(PROMPT)), "delivered"),
            unit="percentunit",
        ),
        Panel(
            "Hit rate by engine",
            "As engines report.",
            (ratio(rate(CACHED, by="pool, engine"), rate(PROMPT, by="pool, engine")), "{{engine}}"),
            unit="percentunit",
        ),
        Stacked(
            "Predictions",
            "Requests by what the engine had cached against the prediction.",
            rates("pointsman_cache_predictions_total", "outcome"),
            unit="reqps",
        ),
        Panel(
            "Hit-rate ladder",
            "From what an unbounded cache could give to what was delivered. `pointsman hit-rate` says why the gaps are there.",
            (f"{rate(LADDER, by='rung')} / on () group_left () ({rate(LADDER_PROMPT)} > 0)", "{{rung}}"),
            unit="percentunit",
        ),
    ),
    Row(
        "Knowledge of caches",
        Stacked(
            "Engines by knowledge",
            "exact: events complete and digests equal. degraded: `pointsman fleet` says why. blind: no events.",
            (
                f"sum by (knowledge) ({highest('pointsman_engine_cache_knowledge', 'pool, engine, knowledge')})",
                "{{knowledge}}",
            ),
        ),
        Panel("Cached blocks", "KV blocks in the index.", levels("pointsman_engine_cached_blocks", "pool, engine")),
        Stacked(
            "KV events",
            "Events of the engines that workers read.",
            rates("pointsman_kv_events_total", "type"),
            unit="eps",
        ),
        Panel(
            "Lag of KV events",
            "From the engine's date of its newest batch until its worker read it; differences of their clocks included.",
            levels("pointsman_kv_events_lag_seconds", "pool, engine"),
            unit="s",
        ),
        Panel(
            "Gaps in KV events",
            "replayed: filled. lost: the cache is unknown until blocks are confirmed.",
            rates("pointsman_kv_event_gaps_total", "engine, outcome"),
            unit="eps",
        ),
        Panel(
            "Events without effect",
            "Not understood, contradicting, or never confirmed.",
            (rate("pointsman_kv_events_undecodable_total", by="engine"), "{{engine}} undecodable"),
            (rate("pointsman_kv_stores_dropped_total", by="engine"), "{{engine}} dropped"),
            (rate("pointsman_kv_blocks_expired_total", by="engine"), "{{engine}} expired"),
            unit="eps",
        ),
        Panel(
            "Hot prefixes copied",
            "Taken by an engine from another, ahead of the requests that need them.",
            rates("pointsman_prefix_copies_total", "engine, outcome"),
            unit="eps",
        ),
        Panel(
            "Resyncs",
            "Snapshots that the scheduler asked for, in 5 minutes.",
            counts("pointsman_cache_resyncs_total", "5m", "engine"),
        ),
    ),
    Row(
        "Decisions",
        Stacked(
            "Placements and refusals",
            "By the leading scheduler.",
            rates("pointsman_decisions_total", "policy, outcome"),
            unit="reqps",
        ),
        Panel(
            "Time of a decision",
            "Wall time, and before it the wait for the leader's turn.",
            *quantiles("pointsman_decision_seconds"),
            *((expr, f"wait {legend}") for expr, legend in quantiles("pointsman_scheduler_request_wait_seconds")),
            unit="s",
        ),
        Panel(
            "Error of prefill predictions",
            "Median, as a share of the time observed. Above 0.3: pointsman calibrate.",
            levels("pointsman_engine_prediction_error_ratio", "pool, engine"),
            unit="percentunit",
        ),
        Panel(
            "First tokens within the upper value",
            "Of their predicted time. Far from 0.9 for long: the load changes faster than it is learned.",
            levels("pointsman_ttft_upper_coverage_ratio", "pool"),
            unit="percentunit",
        ),
        Stacked(
            "Prompt tokens computed",
            "By engine: the load that routing balances.",
            (f"{rate(PROMPT, by='pool, engine')} - {rate(CACHED, by='pool, engine')}", "{{engine}}"),
            unit="tok/s",
        ),
        Stacked(
            "Moves of waiting requests",
            "Applied, or why the leader refused them.",
            rates("pointsman_migrations_total", "outcome"),
            unit="reqps",
        ),
        Panel(
            "Placed without a scheduler; redispatched",
            "The first should be 0.",
            (rate("pointsman_fallback_placements_total"), "without a scheduler"),
            (rate("pointsman_requests_redispatched_total"), "redispatched"),
            unit="reqps",
        ),
        Stacked(
            "Lookups of other routers",
            "POST /kv/overlap and cmd.overlap, by outcome. too_often: start another scheduler.",
            rates("pointsman_overlap_requests_total", "outcome"),
            unit="reqps",
        ),
        Panel("Work for a lookup", "CPU time of a scheduler.", *quantiles("pointsman_overlap_seconds"), unit="s"),
    ),
    Row(
        "Shadow policies (a console with --shadow)",
        Panel(
            "Same choice as the policy in force",
            "Share of placements and rejections that a shadow policy would have decided alike.",
            (
                f"{rate('pointsman_shadow_decisions_total', POOL + SAME, 'shadow')} / {rate('pointsman_shadow_decisions_total', by='shadow')}",
                "{{shadow}}",
            ),
            unit="percentunit",
        ),
        Panel(
            "Predicted hit rate of both choices",
            "At each placement, of the instances that the policy in force (running) and the shadow chose.",
            (
                f"{rate('pointsman_shadow_cached_tokens_total', by='shadow, side')} / on (shadow) group_left {rate('pointsman_shadow_prompt_tokens_total', by='shadow')}",
                "{{shadow}}, {{side}}",
            ),
            unit="percentunit",
        ),
        Panel(
            "Predicted TTFT of both choices",
            "Summed over requests, per second.",
            (rate("pointsman_shadow_predicted_ttft_seconds_total", by="shadow, side"), "{{shadow}}, {{side}}"),
            unit="s",
        ),
        Panel(
            "TTFT of the same arrivals, simulated",
            "P90 of the last window, under the policy in force and under the shadow.",
            (
                highest("pointsman_shadow_window_ttft_seconds", "shadow, side", f'{POOL},quantile="0.9"'),
                "{{shadow}}, {{side}}",
            ),
            unit="s",
        ),
        Panel(
            "Regret, simulated",
            "Mean TTFT lost in the last window by not choosing the shadow; above 0 it would be better.",
            levels("pointsman_shadow_window_regret_seconds", "shadow"),
            unit="s",
        ),
        Panel(
            "Hit rate, simulated",
            "Of the last window.",
            (highest("pointsman_shadow_window_hit_rate", "shadow, side"), "{{shadow}}, {{side}}"),
            unit="percentunit",
        ),
        Panel(
            "Requests on time, simulated",
            "Per engine second of the last window.",
            (highest("pointsman_shadow_window_goodput", "shadow, side"), "{{shadow}}, {{side}}"),
            unit="reqps",
        ),
        Panel(
            "What shadows could not do",
            "Windows by outcome, and decisions left out because there were too many.",
            (rate("pointsman_shadow_windows_total", by="outcome"), "windows {{outcome}}"),
            (rate("pointsman_shadow_decisions_sampled_out_total"), "decisions left out"),
            unit="reqps",
        ),
    ),
)

ENGINES = Board(
    "pointsman-engines",
    "Pointsman / Engines",
    "The fleet: status, load, failures and size.",
    Row(
        "Fleet",
        Stacked(
            "Engines by status",
            "As the scheduler sees them.",
            (f"sum by (status) ({highest('pointsman_engines', 'pool, status')})", "{{status}}"),
        ),
        Panel(
            "Ready and wanted",
            "Wanted by the scaler, if one runs.",
            (highest("pointsman_engines", "pool", READY), "{{pool}} ready"),
            (highest("pointsman_scaler_desired_engines", "pool"), "{{pool}} wanted"),
        ),
        Panel(
            "Roles, ready and wanted",
            "Of a split pool, and the changes of the last hour.",
            levels("pointsman_engine_roles", "pool, role"),
            (highest("pointsman_scaler_desired_roles", "pool, role"), "{{pool}} {{role}} wanted"),
            (events("pointsman_role_changes_total", "1h", "pool, role"), "{{pool}} to {{role}}, 1 h"),
        ),
        Panel(
            "Waiting for any engine",
            "Held in the scheduler or the ingress because none can serve them.",
            (highest("pointsman_held_requests", "pool"), "{{pool}} scheduler"),
            ("sum (pointsman_ingress_held_requests)", "ingress"),
        ),
    ),
    Row(
        "Load",
        Stacked(
            "Waiting in the scheduler",
            "On one engine: a hot prefix. On all: too few engines.",
            levels("pointsman_engine_pending_requests", "pool, engine"),
        ),
        Stacked(
            "In prefill",
            "At the engine, before the first token.",
            levels("pointsman_engine_prefill_requests", "pool, engine"),
        ),
        Stacked(
            "Decoding",
            "At the engine, after the first token.",
            levels("pointsman_engine_decoding_requests", "pool, engine"),
        ),
        Panel(
            "KV cache in use",
            "As engines report.",
            levels("pointsman_engine_kv_cache_usage_ratio", "pool, engine"),
            unit="percentunit",
        ),
        Stacked("Prompt tokens", "Of finished requests.", rates(PROMPT, "pool, engine"), unit="tok/s"),
        Stacked(
            "Output tokens",
            "Of finished requests.",
            rates("pointsman_output_tokens_total", "pool, engine"),
            unit="tok/s",
        ),
    ),
    Row(
        "Failures",
        Stacked(
            "Failures of engines",
            "In 5 minutes, whether or not another engine answered.",
            counts("pointsman_engine_failures_total", "5m", "engine, failure"),
        ),
        Panel(
            "Retries",
            "Sent to another engine, and refused by the retry budget.",
            (rate("pointsman_request_retries_total"), "sent elsewhere"),
            (rate("pointsman_request_retries_refused_total"), "refused"),
            unit="reqps",
        ),
        Stacked(
            "Ejected engines", "1: ejected, or on trial after that.", levels("pointsman_engine_ejected", "pool, engine")
        ),
        Panel(
            "Ejections",
            "By cause, in the last hour.",
            counts("pointsman_engine_ejections_total", "1h", "engine, cause"),
        ),
        Stacked(
            "Engines followed by workers",
            "By what their workers make of them.",
            (f"sum by (status) (pointsman_worker_engines{{{POOL}}})", "{{status}}"),
        ),
        Panel(
            "Errors of the scaler",
            "Decisions that it could not carry out.",
            rates("pointsman_scaler_errors_total", "pool"),
            unit="eps",
        ),
    ),
)

CONTROL = Board(
    "pointsman-control-plane",
    "Pointsman / Control plane",
    "Leadership, log, NATS, recorder, rebalancer and processes.",
    Row(
        "Leadership and NATS",
        Panel(
            "Leaders",
            "One per pool. 0: requests go to the least loaded engine.",
            (f"sum by (pool) (pointsman_leader{{{POOL}}})", "{{pool}}"),
        ),
        Panel("Term", "Each step is an election.", levels("pointsman_leader_term", "pool")),
        Stacked(
            "Connections to NATS",
            "Processes with and without one.",
            (f"sum (pointsman_nats_connected{{{POOL}}})", "connected"),
            (f"sum (1 - pointsman_nats_connected{{{POOL}}})", "disconnected"),
        ),
    ),
    Row(
        "Log",
        Stacked("Events written", "By service.", rates("pointsman_log_events_appended_total", "job"), unit="eps"),
        Panel(
            "Entries not read yet",
            "Recorder: not archived. Growing: too slow, or it hangs.",
            (f"max by (pool, job, instance) (pointsman_log_lag_entries{{{POOL}}})", "{{job}} {{instance}}"),
        ),
        Panel(
            "Size of the log",
            "Full is normal: the oldest entries go.",
            levels("pointsman_log_bytes", "pool"),
            (highest("pointsman_log_bytes_limit", "pool"), "{{pool}} limit"),
            unit="bytes",
        ),
        Panel(
            "Window of unconfirmed writes",
            "At 50% new requests are refused; at 100% writes are lost.",
            (highest("pointsman_log_write_load_ratio", "pool, job"), "{{job}}"),
            unit="percentunit",
        ),
        Panel(
            "Entries kept",
            "Newest minus oldest.",
            (
                f"{highest('pointsman_log_last_sequence', 'pool')} - {highest('pointsman_log_first_sequence', 'pool')} + 1",
                "{{pool}}",
            ),
        ),
        Panel(
            "Trouble with the log",
            "All should be 0.",
            (f"sum (pointsman_log_writes_stalled{{{POOL}}})", "processes whose writes stall"),
            (highest("pointsman_log_copies_behind", "pool"), "copies of the log behind: {{pool}}"),
            (events("pointsman_log_events_lost_total", "5m"), "events lost in 5 min"),
            (
                events("pointsman_scheduler_requests_refused_total", "5m", "reason"),
                "requests refused in 5 min: {{reason}}",
            ),
            (events("pointsman_log_resets_total", "5m"), "resets in 5 min"),
            (events("pointsman_dead_letters_total", "5m"), "dead letters in 5 min"),
            (events("pointsman_nats_forbidden_total", "5m"), "subjects refused in 5 min"),
        ),
        Panel(
            "Entries since the newest checkpoint",
            "What a scheduler that starts folds. Growing for minutes: none is taken.",
            (f"max by (pool, instance) (pointsman_checkpoint_age_entries{{{POOL}}})", "{{pool}} {{instance}}"),
        ),
        Panel(
            "Starts without a checkpoint",
            "In 5 minutes: the whole log was folded.",
            counts("pointsman_log_folded_whole_total", "5m", "reason"),
        ),
        Panel(
            "Archived entries",
            "Per second, by the recorder.",
            (f"max by (pool) (deriv(pointsman_recorder_archived_sequence{{{POOL}}}[$__rate_interval]))", "{{pool}}"),
            unit="eps",
        ),
        Panel(
            "Size of the archive",
            "Used: what --archive-bytes-max bounds.",
            levels("pointsman_recorder_archive_bytes", "pool, kind"),
            unit="bytes",
        ),
        Panel(
            "Oldest entry of the archive",
            "What --archive-days bounds.",
            levels("pointsman_recorder_archive_oldest_seconds", "pool"),
            unit="s",
        ),
        Panel(
            "Entries pruned from the archive",
            "Per second. None at a bound that is exceeded: the database refuses.",
            rates("pointsman_recorder_archive_pruned_total", "pool"),
            unit="eps",
        ),
    ),
    Row(
        "Rebalancer",
        Stacked(
            "Plans", "By policy and answer.", rates("pointsman_migration_plans_total", "policy, outcome"), unit="eps"
        ),
        Panel("Time to plan", "Wall time of a round.", *quantiles("pointsman_migration_planning_seconds"), unit="s"),
        Panel(
            "Event to move",
            "Wall time from the event that a plan answers.",
            *quantiles("pointsman_rebalancing_reaction_seconds"),
            unit="s",
        ),
    ),
    Row(
        "Processes",
        Stacked(
            "CPU",
            "Cores in use. Not told by an ingress of several processes.",
            (
                'sum by (job, instance) (rate(process_cpu_seconds_total{job=~"pointsman.*"}[$__rate_interval]))',
                "{{job}} {{instance}}",
            ),
        ),
        Stacked(
            "Memory",
            "Resident.",
            ('sum by (job, instance) (process_resident_memory_bytes{job=~"pointsman.*"})', "{{job}} {{instance}}"),
            unit="bytes",
        ),
        Stacked("Versions", "Processes by version.", ("count by (version) (pointsman_build_info)", "{{version}}")),
        Panel(
            "Time to tokenise", "Wall time, in the ingress.", *quantiles("pointsman_tokenization_seconds", ""), unit="s"
        ),
        Stacked(
            "Connections refused",
            "Closed before a request, or because the client did not read.",
            rates("pointsman_http_connections_refused_total", "reason", ""),
            unit="eps",
        ),
        Panel(
            "Unexpected errors",
            "Each is a defect: report it. Lines and spans: what reads them is too slow.",
            (f"{rate('pointsman_unexpected_errors_total', '', 'job, step')} > 0", "{{job}} {{step}}"),
            (rate("pointsman_access_log_lines_dropped_total", ""), "access log lines dropped"),
            (rate("pointsman_spans_dropped_total", ""), "spans dropped"),
            unit="eps",
        ),
    ),
)

BOARDS = (OVERVIEW, CACHE, ENGINES, CONTROL)


def files() -> dict[str, str]:
    """Text by file name."""
    return {
        f"{board.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(_dashboard(board)) + "\n" for board in BOARDS
    }


def _dashboard(board: Board) -> model.Dashboard:
    built = (
        builder.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["pointsman"])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            builder.DashboardLink("Pointsman")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["pointsman"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builder.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("pool", "Pool", "label_values(pointsman_pool_info, pool)"))
    )
    if board.has_model:
        query = 'label_values(pointsman_http_requests_total{pool=~"$pool"}, model)'
        built = built.with_variable(_variable("model", "Model", query))
    number, top = 0, 0
    for row in board.rows:
        number += 1
        built = built.with_row(builder.Row(row.title).id(number).grid_pos(model.GridPos(h=1, w=WIDTH, x=0, y=top)))
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            place = model.GridPos(h=panel.height, w=panel.width, x=left, y=top)
            built = built.with_panel(_panel(panel, number).grid_pos(place))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return built.build()


def _variable(name: str, label: str, query: str) -> builder.QueryVariable:
    return (
        builder.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


PanelBuilder = timeseries.Panel | stat.Panel | heatmap.Panel


def _panel(panel: Panel, number: int) -> PanelBuilder:
    built = _of_kind(panel).id(number).title(panel.title).description(panel.description).unit(panel.unit)
    built = built.datasource(SOURCE)
    for letter, (expression, legend) in zip("ABCDEFG", panel.queries, strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        if panel.kind == "heatmap":
            query = query.format("heatmap")
        built = built.with_target(query.instant() if panel.kind == "stat" else query.range())
    return built


def _of_kind(panel: Panel) -> PanelBuilder:
    match panel.kind:
        case "stat":
            return stat.Panel().thresholds(_thresholds(panel)).graph_mode(common.BigValueGraphMode.NONE)
        case "heatmap":
            return (
                heatmap.Panel()
                .calculate(False)
                .y_axis(heatmap.YAxisConfig().unit(panel.unit))
                .color(
                    heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
                )
            )
    lines = (
        timeseries.Panel()
        .min(0)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(_legend())
    )
    if panel.kind == "stacked":
        lines = lines.fill_opacity(30).stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL))
    return lines


def _legend() -> common_builder.VizLegendOptions:
    """The builder hides the legend unless told."""
    options = common_builder.VizLegendOptions().show_legend(True)
    return options.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM)


def _thresholds(panel: Panel) -> builder.ThresholdsConfig:
    below, above = "green", "green"
    at: float | None = None
    if panel.red_above is not None:
        at, above = panel.red_above, "red"
    elif panel.red_below is not None:
        at, below = panel.red_below, "red"
    steps = [model.Threshold(value=None, color=below)]
    if at is not None:
        steps.append(model.Threshold(value=at, color=above))
    return builder.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def main() -> int:
    OUT.mkdir(exist_ok=True)
    for name, text in files().items():
        (OUT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
