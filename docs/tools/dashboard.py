"""The Grafana dashboard, as JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WHERE = '{model_name=~"$model_name", engine=~"$engine"}'
_WINDOW = "[$__rate_interval]"


class _Panel(NamedTuple):
    title: str
    text: str
    unit: str
    queries: Mapping[str, str]
    """Legend and PromQL."""


def _rate(metric: str, by: str = "method") -> str:
    return f"sum by ({by}) (rate({metric}{_WHERE}{_WINDOW}))"


def _ratio(above: str, below: str, by: str = "method") -> str:
    return f"{_rate(above, by)} / {_rate(below, by)}"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{_WHERE}{_WINDOW})))"


_BEAM = "vllm:trie_beam"
_STEPS = "vllm:trie_steps_total"
_PANELS = (
    _Panel(
        "Tokens per step",
        "New tokens of a request in one step of the model. 1 is plain decoding.",
        "none",
        {"{{method}}": _ratio("vllm:trie_tokens_total", _STEPS),
         "{{method}}, last log line": f"avg by (method) (vllm:trie_tokens_per_step{_WHERE})"},
    ),
    _Panel(
        "Output tokens per second",
        "Of all requests, as vLLM counts them.",
        "none",
        {"tokens/s": f"sum(rate(vllm:generation_tokens_total{_WHERE}{_WINDOW}))"},
    ),
    _Panel(
        "Nodes and accepted tokens of a tree",
        "Nodes of the verified trees, and accepted ones.",
        "none",
        {"nodes, {{method}}": _ratio("vllm:trie_draft_nodes_total",
                                     "vllm:trie_verified_trees_total"),
         "accepted, {{method}}": _ratio("vllm:trie_accepted_tokens_total",
                                        "vllm:trie_verified_trees_total")},
    ),
    _Panel(
        "Accepted nodes",
        "Accepted tokens over verified nodes. Low values are normal for trees: most branches are "
        "alternatives to one another.",
        "percentunit",
        {"{{method}}": _ratio("vllm:trie_accepted_tokens_total", "vllm:trie_draft_nodes_total")},
    ),
    _Panel(
        "Steps with a tree",
        "The other steps had no draft: no guess, or no node worth its cost.",
        "percentunit",
        {"{{method}}": _ratio("vllm:trie_verified_trees_total", _STEPS)},
    ),
    _Panel(
        "Time of a step and request",
        "Drafting, walking trees and moving KV, placing trees and bookkeeping. The model's "
        "forward pass is not included.",
        "s",
        {"drafting": _ratio("vllm:trie_drafting_seconds_total", _STEPS),
         "verification": _ratio("vllm:trie_verification_seconds_total", _STEPS),
         "overhead": _ratio("vllm:trie_overhead_seconds_total", _STEPS)},
    ),
    _Panel(
        "Share of the engine's time",
        "Seconds per second.",
        "percentunit",
        {"drafting": _rate("vllm:trie_drafting_seconds_total"),
         "verification": _rate("vllm:trie_verification_seconds_total"),
         "overhead": _rate("vllm:trie_overhead_seconds_total")},
    ),
    _Panel(
        "Predicted outputs",
        "Tokens drafted from the predictions of requests. Rejected: the answer was different.",
        "none",
        {"accepted": _rate("vllm:trie_accepted_prediction_tokens_total"),
         "rejected": _rate("vllm:trie_rejected_prediction_tokens_total")},
    ),
    _Panel(
        "Failed drafts",
        "By reason; any is a bug in a drafter. Output is not affected.",
        "none",
        {"{{reason}}": f"sum by (reason) (increase(vllm:trie_draft_failures_total{_WHERE}"
                       f"{_WINDOW}))"},
    ),
    _Panel(
        "Waits for the device",
        "Steps a second that the worker of Model Runner V2 waited for before it launched the next.",
        "none",
        {"{{cause}}": f"sum by (cause) (rate(vllm:trie_device_waits_total{_WHERE}{_WINDOW}))"},
    ),
    _Panel(
        "Time per output token",
        "Of each finished request behind its first token, as vLLM measures it. vLLM's time between "
        "tokens is that between steps, which drafts make longer.",
        "s",
        {"median": _quantile(0.5, "vllm:request_time_per_output_token_seconds"),
         "95 %": _quantile(0.95, "vllm:request_time_per_output_token_seconds")},
    ),
    _Panel(
        "Beam searches",
        "Finished searches per second, their mean width and mean number of steps.",
        "none",
        {"searches/s": _rate(f"{_BEAM}_searches_total", "engine"),
         "width": _ratio(f"{_BEAM}_hypotheses_total", f"{_BEAM}_searches_total", "engine"),
         "steps": _ratio(f"{_BEAM}_steps_total", f"{_BEAM}_searches_total", "engine")},
    ),
    _Panel(
        "Waiting time of beam searches",
        "Mean time from a search's arrival to its start: until its slots are free.",
        "s",
        {"waiting": _ratio(f"{_BEAM}_waiting_seconds_total", f"{_BEAM}_searches_total", "engine")},
    ),
    _Panel(
        "Requests and KV cache",
        "Input of the node budget: the more requests run, the fewer nodes are worth their cost.",
        "none",
        {"running": f"sum(vllm:num_requests_running{_WHERE})",
         "waiting": f"sum(vllm:num_requests_waiting{_WHERE})",
         "KV cache used, %": f"100 * avg(vllm:kv_cache_usage_perc{_WHERE})"},
    ),
)  # fmt: skip


def dashboard() -> str:
    """The file's text."""
    content = {
        "title": "vllm-trie",
        "uid": "vllm-trie",
        "description": "Tree speculative decoding in vLLM: drafts, acceptance and cost.",
        "tags": ["vllm", "speculative decoding"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(_PANELS)],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    labels = [
        {
            "name": label,
            "label": title,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values({_STEPS}, {label})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
        for label, title in (("model_name", "Model"), ("engine", "Engine"))
    ]
    return [source | {"query": "prometheus"}, *labels]


def _panel(number: int, panel: _Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.text,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }
