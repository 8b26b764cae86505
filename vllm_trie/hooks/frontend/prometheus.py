"""Prometheus metrics of the plugin."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

LABELS = ("model_name", "engine")
"""Labels of every metric."""


def register_metric(
    kind: Any, name: str, text: str, labels: tuple[str, ...], **options: object
) -> Any:
    """Return the metric of this name, made at the first call."""
    metric = REGISTRY._names_to_collectors.get(name)
    return kind(name, text, labelnames=labels, **options) if metric is None else metric
