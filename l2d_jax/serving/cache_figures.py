"""The prefix cache in `/metrics`."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from l2d_jax.decoding.batch.prefix_cache import PrefixCache


class CacheFigures(Collector):
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
