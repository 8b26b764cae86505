"""Metrics of searches, whose report travels with their result."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter

from vllm_trie.extras import brought
from vllm_trie.hooks.frontend.prometheus import LABELS, register_metric

_BEAM_COUNTERS = {
    "searches": "Beam searches that ended.",
    "hypotheses": "Sum of their widths.",
    "waiting_seconds": "Time from their arrival to their start.",
    "steps": "Steps that they took.",
}
"""Those of beam searches; their names begin with ``vllm:trie_beam_``."""


@functools.cache
def beam_counters() -> Mapping[str, str]:
    """Return those of beam searches and of extras, with their help texts."""
    of_extras = (texts for _, texts in brought("search_counters"))
    return {name: text for texts in (_BEAM_COUNTERS, *of_extras) for name, text in texts.items()}


def beam_counter(name: str) -> Any:
    """Return a counter of :func:`beam_counters`, registered once a process."""
    return register_metric(Counter, f"vllm:trie_beam_{name}", beam_counters()[name], LABELS)


def record_search(report: Mapping[str, object]) -> None:
    """Count a search, whose report has labels and amounts."""
    labels = [report[label] for label in LABELS]
    for name in report.keys() & beam_counters().keys():
        beam_counter(name).labels(*labels).inc(report[name])
