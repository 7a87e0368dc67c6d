"""The figures of a server in `/metrics`, for Prometheus."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from l2d_jax.decoding.batch.prefix_cache import PrefixCache
from l2d_jax.serving.engine import Engine


class Figures:
    """What a server has done so far, and its load."""

    def __init__(self, engine: Engine) -> None:
        self._registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self._registry)
        self._requests = counter("l2d_requests", "Requests for answers, by HTTP status.", ["status"])
        self._tokens = counter("l2d_tokens", "Tokens of prompts and of answers.", ["kind"])
        self._evaluations = counter("l2d_evaluations", "Evaluations of the diffusion path.")
        self._passes = counter("l2d_passes", "Passes over the weights for the tokens of answers.")
        about = "From a request to the end of its answers."
        self.seconds = prometheus.Histogram("l2d_request_seconds", about, registry=self._registry)
        for name, place in (("decoding", 0), ("waiting", 1)):
            gauge = prometheus.Gauge(f"l2d_answers_{name}", f"Answers that are {name}.", registry=self._registry)
            gauge.set_function(partial(lambda place: engine.load[place], place))
        if engine.service.prefixes is not None:
            self._registry.register(_CacheFigures(engine.service.prefixes))

    def add_request(self, status: int) -> None:
        """Count a request for answers."""
        self._requests.labels(status).inc()

    def add_usage(self, usage: Mapping[str, Any]) -> None:
        """Count what a request has used, as its reply says."""
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("answer").inc(usage["completion_tokens"])
        self._evaluations.inc(usage["evaluations"])
        self._passes.inc(usage["passes"])

    def text(self) -> bytes:
        """The figures, as Prometheus reads them."""
        return prometheus.generate_latest(self._registry)


class _CacheFigures(Collector):
    """What a prefix cache has done so far, and its size."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield the figures, as Prometheus reads them."""
        counts, about = self._cache.counts, "Tokens of prompts, by where their keys and values came from."
        tokens = CounterMetricFamily("l2d_prefix_cache_tokens", about, labels=["source"])
        tokens.add_metric(["cache"], counts.found)
        tokens.add_metric(["read"], counts.read)
        yield tokens
        about = "Blocks of the prefix cache that made room for others."
        yield CounterMetricFamily("l2d_prefix_cache_evictions", about, value=counts.evicted)
        used, size = "Bytes of the prefix cache that are in use.", "Bytes of the prefix cache."
        yield GaugeMetricFamily("l2d_prefix_cache_used_bytes", used, value=self._cache.used_bytes)
        yield GaugeMetricFamily("l2d_prefix_cache_bytes", size, value=self._cache.size)
