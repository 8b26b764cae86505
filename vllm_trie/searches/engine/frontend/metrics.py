"""Metrics of searches, whose report travels with their result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter

from vllm_trie.hooks.frontend.prometheus import LABELS, register_metric

BEAM_COUNTERS = {
    "searches": "Beam searches that ended.",
    "hypotheses": "Sum of their widths.",
    "waiting_seconds": "Time from their arrival to their start.",
    "steps": "Steps that they took.",
}
"""Help texts of counters, whose names begin with ``vllm:trie_beam_``."""


def beam_counter(name: str) -> Any:
    """Return one of `BEAM_COUNTERS`, registered once a process."""
    return register_metric(Counter, f"vllm:trie_beam_{name}", BEAM_COUNTERS[name], LABELS)


def record_search(report: Mapping[str, object]) -> None:
    """Count a search, whose report has labels and amounts."""
    labels = [report[label] for label in LABELS]
    for name in report.keys() & BEAM_COUNTERS.keys():
        beam_counter(name).labels(*labels).inc(report[name])
