"""Metrics of drafts in vLLM's endpoint and in its log.

The scheduler sends the workers' statistics with its own, see
:mod:`vllm_trie.drafts.engine.scheduler.speculation`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_trie.drafts.engine import config
from vllm_trie.extras import brought
from vllm_trie.hooks.frontend.prometheus import LABELS, register_metric
from vllm_trie.hooks.ledger.record import STATS, Symbols
from vllm_trie.hooks.wire import FAILURE_REASONS, WAIT_CAUSES, TreeStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import SchedulerStats

logger = init_logger(f"vllm.{__name__}")

_LABELS = (*LABELS, "method")


@Symbols("v1.metrics.loggers:StatLoggerManager.", STATS).wraps(
    "__init__",
    "adds the plugin's stat logger",
    until="stat logger plugins are loaded for LLM as for AsyncLLM",
)
def init_stat_loggers(
    original: Callable[..., None],
    self: StatLoggerManager,
    vllm_config: VllmConfig,
    engine_idxs: Any = None,
    custom_stat_loggers: Any = None,
    *args: object,
    **kwargs: object,
) -> None:
    if config.read(vllm_config) is not None:
        custom_stat_loggers = [*(custom_stat_loggers or ()), TreeStatLogger]
    original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)


_COUNTERS = {
    "draft_nodes": "Nodes of draft trees that were verified.",
    "accepted_tokens": "Draft tokens that were accepted.",
    "verified_trees": "Draft trees that were verified.",
    "steps": "Times that a request got new tokens.",
    "tokens": "Output tokens, accepted and sampled ones.",
    "drafting_seconds": "Time in the drafter.",
    "verification_seconds": (
        "Time to walk the trees and move KV, without the target's forward pass."
    ),
    "overhead_seconds": "Time to place trees into the batch and to keep books.",
}
"""Counters with their help texts; their names begin with ``vllm:trie_``."""


@functools.cache
def _brought_counters() -> Mapping[str, str]:
    """Return those of extras, which count them by these names in :class:`TreeStats`."""
    return {name: text for _, texts in brought("counters") for name, text in texts.items()}


class _Metrics:
    """The plugin's Prometheus metrics, registered once a process.

    They carry vLLM's prefix, so that its snapshot for ``LLM.get_metrics`` holds them too. For the
    same reason vLLM unregisters them when it starts a Prometheus logger, so they are made once all
    loggers are.
    """

    def __init__(self) -> None:
        self.counters = {
            name: register_metric(Counter, f"vllm:trie_{name}", text, _LABELS)
            for name, text in {**_COUNTERS, **_brought_counters()}.items()
        }
        self.draft_failures = register_metric(
            Counter, "vllm:trie_draft_failures", "Drafts that failed.", (*_LABELS, "reason")
        )
        self.waits = register_metric(
            Counter,
            "vllm:trie_device_waits",
            "Steps that the host waited for before it launched the next.",
            (*_LABELS, "cause"),
        )
        self.tokens_per_step = register_metric(
            Gauge,
            "vllm:trie_tokens_per_step",
            "Mean of the new tokens a step and request, over the last logging interval.",
            _LABELS,
            multiprocess_mode="mostrecent",
        )


_stat_logger = Symbols("v1.metrics.loggers:StatLoggerBase.", STATS)


class TreeStatLogger(StatLoggerBase):
    """Feeds the plugin's counters and logs a line at vLLM's interval."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        tree_config = config.read(vllm_config)
        assert tree_config is not None
        self.method = tree_config.method
        served_name = vllm_config.model_config.served_model_name
        self._labels = (served_name, str(engine_index), self.method)
        self._metrics: _Metrics | None = None
        self._reset()

    def _reset(self) -> None:
        names = (*_COUNTERS, *_brought_counters())
        self._sums = dict.fromkeys(names, 0.0)  # of the logging interval
        self._failures = 0
        self._interval_start = time.monotonic()

    @_stat_logger.overrides("counts a step's drafts")
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: object,
        *unused: object,
        **unused_too: object,
    ) -> None:
        if scheduler_stats is None:
            return
        shared = scheduler_stats.spec_decoding_stats
        if shared is None:
            return
        if self._metrics is None:
            self.log_engine_initialized()
        assert self._metrics is not None
        self._count(
            draft_nodes=shared.num_draft_tokens,
            accepted_tokens=shared.num_accepted_tokens,
            verified_trees=shared.num_drafts,
        )
        tree: TreeStats | None = getattr(shared, "tree", None)  # of steps with drafts
        if tree is None:
            return
        self._count(
            steps=tree.steps,
            tokens=tree.tokens,
            drafting_seconds=tree.drafting_seconds,
            verification_seconds=tree.verification_seconds,
            overhead_seconds=tree.preparation_seconds + tree.bookkeeping_seconds,
            **{name: tree.counts.get(name, 0) for name in _brought_counters()},
        )
        for reason in FAILURE_REASONS:
            failed = tree.draft_failures.get(reason, 0)
            self._metrics.draft_failures.labels(*self._labels, reason).inc(failed)
        for cause in WAIT_CAUSES:
            self._metrics.waits.labels(*self._labels, cause).inc(tree.waits.get(cause, 0))
        self._failures += sum(tree.draft_failures.values())

    def _count(self, **amounts: float) -> None:
        assert self._metrics is not None
        for name, amount in amounts.items():
            self._metrics.counters[name].labels(*self._labels).inc(amount)
            self._sums[name] += amount

    @_stat_logger.overrides("logs a line")
    def log(self) -> None:
        sums, elapsed = self._sums, time.monotonic() - self._interval_start
        if self._metrics is not None and sums["steps"] and elapsed > 0:
            tokens_per_step = sums["tokens"] / sums["steps"]
            self._metrics.tokens_per_step.labels(*self._labels).set(tokens_per_step)
            drafting, verification = sums["drafting_seconds"], sums["verification_seconds"]
            logger.info(
                "vllm-trie %s: %.2f tokens per step, %.1f nodes drafted and %.2f accepted per "
                "tree, drafting %.3f ms and verification %.3f ms per step and request "
                "(%.1f %% of the time), failed drafts: %d",
                self.method,
                tokens_per_step,
                sums["draft_nodes"] / max(1, sums["verified_trees"]),
                sums["accepted_tokens"] / max(1, sums["verified_trees"]),
                1e3 * drafting / sums["steps"],
                1e3 * verification / sums["steps"],
                1e2 * (drafting + verification) / elapsed,
                self._failures,
            )
        self._reset()

    @_stat_logger.overrides("registers the plugin's metrics")
    def log_engine_initialized(self) -> None:
        """Make the metrics; failures begin at 0, or their first would be no increase."""
        self._metrics = _Metrics()
        for reason in FAILURE_REASONS:
            self._metrics.draft_failures.labels(*self._labels, reason)
