"""The engine's metrics under vLLM's names, in engine time."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from pointsman.primitives import EngineSeconds
from pointsman.simulation.engine_model import EngineModel
from pointsman_engine_sim.engine import Timings

TTFT_BUCKETS_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
E2E_BUCKETS_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
LABELS = ("model_name", "engine")


class EngineMetrics(Timings):
    def __init__(self, model: EngineModel, *, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.",
            LABELS, buckets=TTFT_BUCKETS_SECONDS, registry=self._registry,
        ).labels(*self._labels)  # fmt: skip
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.",
            LABELS, buckets=E2E_BUCKETS_SECONDS, registry=self._registry,
        ).labels(*self._labels)  # fmt: skip
        self._finished = 0
        self._registry.register(_ModelCollector(self, model))

    @override
    def first_token(self, seconds: EngineSeconds) -> None:
        self._first_token.observe(seconds)

    @override
    def finished(self, seconds: EngineSeconds) -> None:
        self._finished += 1
        self._e2e.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def families(self, model: EngineModel) -> Iterator[Metric]:
        counts = model.counts
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", counts.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", counts.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", counts.kv_usage)
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", counts.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", counts.prefix_cache_hits)
        external = "External prefix cache hits from KV connector cross-instance cache sharing, in tokens."
        yield self._counter("external_prefix_cache_hits", external, counts.external_prefix_cache_hits)
        yield self._counter("num_preemptions", "Cumulative number of preemptions from the engine.", counts.preemptions)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", counts.prompt_tokens)
        yield self._counter("generation_tokens", "Number of generation tokens processed.", counts.generation_tokens)
        yield self._success()
        yield _cache_config(model)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Count of successfully processed requests.", labels=(*LABELS, "finished_reason")
        )
        family.add_metric((*self._labels, "length"), self._finished)
        return family


class _ModelCollector(Collector):
    def __init__(self, metrics: EngineMetrics, model: EngineModel) -> None:
        self._metrics = metrics
        self._model = model

    @override
    def collect(self) -> Iterator[Metric]:
        return self._metrics.families(self._model)


def _cache_config(model: EngineModel) -> Metric:
    blocks, block_size = model.cache.blocks_max, model.settings.block_size
    values = {
        "block_size": block_size,
        "num_gpu_blocks": blocks,
        "kv_cache_size_tokens": blocks * block_size,
        "enable_prefix_caching": True,
        "cache_dtype": "auto",
        "engine": 0,
    }
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(values)
    )
    family.add_metric([str(value) for value in values.values()], 1)
    return family
