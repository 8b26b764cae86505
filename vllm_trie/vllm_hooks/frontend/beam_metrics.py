"""Prometheus metrics of native beam searches.

A search's report travels to the front end with the result of one of its hypotheses: it needs no
field of vLLM's statistics, and no message of its own.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter

from vllm_trie.vllm_hooks.frontend.stat_logger import register_metric

REPORT = "report"
"""Key of a result with the search's report: the labels, and amounts by the names of counters."""

LABELS = ("model_name", "engine")

COUNTERS = {
    "searches": "Beam searches that ended.",
    "hypotheses": "Sum of their widths.",
    "waiting_seconds": "Time from their arrival to their start.",
    "steps": "Steps that they took.",
    "item_steps": "Steps of those inside catalogues.",
    "valid_children": "Tokens that could follow the hypotheses of these steps.",
    "forced_tokens": "Hypotheses of these steps that only one token could follow.",
}
"""Counters with their help texts; their names begin with ``vllm:trie_beam_``."""


def counter(name: str) -> Any:
    """Return a counter, registered once a process."""
    return register_metric(Counter, f"vllm:trie_beam_{name}", COUNTERS[name], LABELS)


def record(result: dict[str, Any]) -> None:
    """Count a search if this result has its report, and take the report out."""
    report = result.pop(REPORT, None)
    if report is not None:
        labels = [report.pop(label) for label in LABELS]
        for name, amount in report.items():
            counter(name).labels(*labels).inc(amount)
