"""From the worker to vLLM's metrics endpoint and its log.

A worker hangs its :class:`TreeStats` on ``ModelRunnerOutput``; the scheduler, which shares a
process with it or gets the object pickled, moves them into the ``SpecDecodingStats`` that vLLM
already sends to the front end; a stat logger there feeds Prometheus counters and writes a line at
vLLM's interval.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.drafting.guard import FAILURE_REASONS
from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE, TreeStats

logger = init_logger(__name__)

_LABELS = ("model_name", "engine", "method")


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's speculation statistics of a step, with the plugin's beside them."""

    tree: TreeStats = field(default_factory=TreeStats)


# -- engine core ---------------------------------------------------------------------------------


def install_in_scheduler() -> None:
    """Let schedulers pass the workers' statistics on, and the front end decode them."""
    # The front end's decoder is built from this annotation.
    SchedulerStats.__annotations__["spec_decoding_stats"] = TreeSpecDecodingStats | None
    stock_update = Scheduler.update_from_output
    stock_make_stats = Scheduler.make_stats

    @functools.wraps(stock_update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = getattr(model_runner_output, STATS_ATTRIBUTE, None)
        if report is not None:
            pending = getattr(self, STATS_ATTRIBUTE, None)
            if pending is None:
                setattr(self, STATS_ATTRIBUTE, report)
            else:
                pending.add(report)
        return stock_update(self, scheduler_output, model_runner_output)

    @functools.wraps(stock_make_stats)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = stock_make_stats(self, *args, **kwargs)
        pending = getattr(self, STATS_ATTRIBUTE, None)
        # A report waits for a step with drafts: vLLM divides by their number.
        if stats is not None and stats.spec_decoding_stats is not None and pending is not None:
            shared = stats.spec_decoding_stats
            values = {f.name: getattr(shared, f.name) for f in fields(SpecDecodingStats)}
            stats.spec_decoding_stats = TreeSpecDecodingStats(**values, tree=pending)
            setattr(self, STATS_ATTRIBUTE, None)
        return stats

    Scheduler.update_from_output = update_from_output
    Scheduler.make_stats = make_stats


# -- front end -----------------------------------------------------------------------------------


def install_in_front_end() -> None:
    """Let every stat logger manager start a :class:`TreeStatLogger` for tree engines."""
    if offered("stat_loggers"):
        from vllm.v1.metrics.loggers import register_stat_loggers

        register_stat_loggers(stat_loggers)
        return
    stock_init = StatLoggerManager.__init__

    @functools.wraps(stock_init)
    def __init__(
        self: Any,
        vllm_config: Any,
        engine_idxs: Any = None,
        custom_stat_loggers: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if ours := stat_loggers(vllm_config):
            custom_stat_loggers = [*(custom_stat_loggers or ()), *ours]
        stock_init(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    StatLoggerManager.__init__ = __init__


def stat_loggers(vllm_config: Any) -> list[type[TreeStatLogger]]:
    """The stat loggers that an engine with this configuration needs."""
    return [] if config.read(vllm_config) is None else [TreeStatLogger]


def _worker_report(scheduler_stats: Any) -> TreeStats | None:
    """What the workers reported, in the field of a patched vLLM or beside vLLM's own numbers."""
    report = getattr(scheduler_stats, "proposer_stats", None)
    if report is not None:
        return TreeStats(**report)
    return getattr(scheduler_stats.spec_decoding_stats, "tree", None)


class _Metrics:
    """The plugin's Prometheus metrics, registered once a process.

    They carry vLLM's prefix, so that its snapshot for ``LLM.get_metrics`` holds them too; for the
    same reason vLLM unregisters them when it starts a Prometheus logger, so they are made at the
    first record, after that.
    """

    def __init__(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return _register(Counter, f"vllm:trie_{name}", text, (*_LABELS, *labels))

        self.draft_nodes = counter("draft_nodes", "Nodes of draft trees that were verified.")
        self.accepted_tokens = counter("accepted_tokens", "Draft tokens that were accepted.")
        self.verified_trees = counter("verified_trees", "Draft trees that were verified.")
        self.steps = counter("steps", "Times that a request got new tokens.")
        self.tokens = counter("tokens", "Output tokens, accepted and sampled ones.")
        self.drafting_seconds = counter("drafting_seconds", "Time in the drafter.")
        self.verification_seconds = counter(
            "verification_seconds",
            "Time to walk the trees and move KV, without the target's forward pass.",
        )
        self.overhead_seconds = counter(
            "overhead_seconds", "Time to place trees into the batch and to keep books."
        )
        self.draft_failures = counter("draft_failures", "Drafts that failed.", "reason")
        self.tokens_per_step = _register(
            Gauge,
            "vllm:trie_tokens_per_step",
            "Mean of the new tokens a step and request, over the last logging interval.",
            _LABELS,
            multiprocess_mode="mostrecent",
        )


def _register(kind: Any, name: str, text: str, labels: tuple[str, ...], **options: Any) -> Any:
    known = REGISTRY._names_to_collectors.get(name)
    return known if known is not None else kind(name, text, labelnames=labels, **options)


class TreeStatLogger(StatLoggerBase):
    """Feeds the plugin's counters and logs a line at vLLM's interval."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.method = config.read(vllm_config).method
        self._labels = (
            vllm_config.model_config.served_model_name,
            str(engine_index),
            self.method,
        )
        self._metrics: _Metrics | None = None
        self._reset()

    def _reset(self) -> None:
        self._interval = TreeStats()
        self._interval_nodes = self._interval_accepted = self._interval_trees = 0
        self._interval_start = time.monotonic()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *unused: Any, **unused_too: Any
    ) -> None:
        if scheduler_stats is None:
            return
        shared, tree = scheduler_stats.spec_decoding_stats, _worker_report(scheduler_stats)
        if shared is None and tree is None:
            return
        if self._metrics is None:
            self._metrics = _Metrics()
        metrics, labels = self._metrics, self._labels
        if shared is not None:
            metrics.draft_nodes.labels(*labels).inc(shared.num_draft_tokens)
            metrics.accepted_tokens.labels(*labels).inc(shared.num_accepted_tokens)
            metrics.verified_trees.labels(*labels).inc(shared.num_drafts)
            self._interval_nodes += shared.num_draft_tokens
            self._interval_accepted += shared.num_accepted_tokens
            self._interval_trees += shared.num_drafts
        if tree is None:
            return
        metrics.steps.labels(*labels).inc(tree.steps)
        metrics.tokens.labels(*labels).inc(tree.tokens)
        metrics.drafting_seconds.labels(*labels).inc(tree.drafting_seconds)
        metrics.verification_seconds.labels(*labels).inc(tree.verification_seconds)
        overhead = tree.preparation_seconds + tree.bookkeeping_seconds
        metrics.overhead_seconds.labels(*labels).inc(overhead)
        for reason in FAILURE_REASONS:
            failed = tree.draft_failures.get(reason, 0)
            metrics.draft_failures.labels(*labels, reason).inc(failed)
        self._interval.add(tree)

    def log(self) -> None:
        interval, elapsed = self._interval, time.monotonic() - self._interval_start
        if self._metrics is not None and interval.steps and elapsed > 0:
            tokens_per_step = interval.tokens / interval.steps
            self._metrics.tokens_per_step.labels(*self._labels).set(tokens_per_step)
            logger.info(
                "vllm-trie %s: %.2f tokens per step, %.1f nodes drafted and %.2f accepted per "
                "tree, drafting %.3f ms and verification %.3f ms per step and request "
                "(%.1f %% of the time), failed drafts: %d",
                self.method,
                tokens_per_step,
                self._interval_nodes / max(1, self._interval_trees),
                self._interval_accepted / max(1, self._interval_trees),
                1e3 * interval.drafting_seconds / interval.steps,
                1e3 * interval.verification_seconds / interval.steps,
                1e2 * (interval.drafting_seconds + interval.verification_seconds) / elapsed,
                sum(interval.draft_failures.values()),
            )
        self._reset()

    def log_engine_initialized(self) -> None:
        pass
