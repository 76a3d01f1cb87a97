"""What /metrics says, for Prometheus. One registry a server: nothing global."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nanoengine.server.async_engine import AsyncEngine
from nanoengine.server.output_stream import Update

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Bounds in seconds: from a GPU's few milliseconds to a laptop's.
FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
END_TO_END = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Hand ``observe`` to an AsyncEngine as listener; then tell it the engine with ``watch``."""

    def __init__(self):
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, bounds) -> Histogram:
            return Histogram(f"nanoengine_{name}", text, buckets=bounds, registry=self.registry)

        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token (TTFT)", FIRST_TOKEN)
        self.between = histogram("inter_token_latency_seconds", "Between two tokens of a request (ITL)", BETWEEN)
        self.whole = histogram("request_seconds", "From arrival to the end of a request", END_TO_END)
        count = dict(registry=self.registry)
        self.prompt_tokens = Counter("nanoengine_prompt_tokens", "Prompt tokens of requests that got a token", **count)
        self.new_tokens = Counter("nanoengine_generation_tokens", "Tokens generated", **count)
        self.finished = Counter("nanoengine_requests", "Requests ended, by finish_reason", ["reason"], **count)
        self.refused = Counter("nanoengine_requests_refused", "Requests refused, by HTTP status", ["status"], **count)

    def watch(self, engine: AsyncEngine) -> None:
        self.registry.register(_EngineCollector(engine))

    def observe(self, update: Update) -> None:
        """Count one update of one request."""
        if update.token_ids:
            self.new_tokens.inc(len(update.token_ids))
            if update.before is None:
                self.first.observe(update.at - update.arrival)
                self.prompt_tokens.inc(update.num_prompt_tokens)
            else:
                self.between.observe(update.at - update.before)
        if update.finish_reason is not None:
            self.finished.labels("error" if update.failed else update.finish_reason).inc()
            if update.finish_reason not in ("abort", "error"):
                self.whole.observe(update.at - update.arrival)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads the engine's own counts when it is asked, and not at each step."""

    def __init__(self, engine: AsyncEngine):
        self.engine = engine

    def collect(self):
        stats = self.engine.stats
        gauges = {
            "requests_running": ("Requests that hold KV blocks", stats.running),
            "requests_waiting": ("Requests that wait for blocks or a place in the batch", stats.waiting),
            "requests_open": ("Requests added and not ended", self.engine.num_open),
            "kv_blocks": ("Blocks in the KV pool", stats.num_blocks),
            "kv_blocks_free": ("Blocks that no sequence holds", stats.free_blocks),
            "kv_use_ratio": ("Share of the KV pool that sequences hold", stats.kv_use),
            "prefix_hit_ratio": ("Share of looked-up prompt tokens that the prefix cache had", stats.hit_rate),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"nanoengine_{name}", text, value=value)
        counters = {
            "prefix_queried_tokens": ("Prompt tokens looked up in the prefix cache", stats.queried_tokens),
            "prefix_hit_tokens": ("Prompt tokens found in the prefix cache", stats.hit_tokens),
            "preemptions": ("Sequences that had to give their blocks back", stats.preemptions),
            "steps": ("Steps of the engine", stats.steps),
            "failed_steps": ("Steps that raised and were started over", stats.failures),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"nanoengine_{name}", text, value=value)
        text = "Requests left or out of time, by the steps begun after that and before their blocks were free"
        aborted = CounterMetricFamily("nanoengine_requests_aborted", text, labels=["steps"])
        for steps, count in sorted(dict(self.engine.aborted).items()):
            aborted.add_metric([str(steps)], count)
        yield aborted
