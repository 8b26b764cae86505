"""Extension points of a patched vLLM, which the plugin uses in place of its own patches.

Stock vLLM has none of them. The series in ``patches/`` adds them one by one, and any first part of
it will do. The plugin registers at the points that it finds and patches the rest at run time;
neither needs a setting.
"""

from __future__ import annotations

import functools

from vllm_trie.vllm_hooks.ledger.patch import Feature, resolve

EXTENSION_POINTS: dict[str, tuple[str, str]] = {
    "speculative_methods": ("0001", "v1.spec_decode.method_registry:register_speculative_methods"),
    "backend_overrides": ("0003", "v1.attention.backends.registry:get_backend_overrides"),
    "request_proposer": ("0004", "v1.spec_decode.custom_class_proposer:RequestProposer"),
    "draft_trees": ("0005", "v1.attention.backend:CommonAttentionMetadata.draft_trees"),
    "draft_verifier": ("0006", "v1.spec_decode.draft_verifier:DraftVerifier"),
    "cache_salt": ("0007", "v1.worker.gpu_input_batch:CachedRequestState.cache_salt"),
    "proposer_stats": ("0008", "v1.metrics.stats:SchedulerStats.proposer_stats"),
    "stat_loggers": ("0009", "v1.metrics.loggers:register_stat_loggers"),
    "request_extension": ("0010", "plugins.request_extension:register_request_extension"),
    "distinct_outputs": ("0011", "plugins.request_extension:RequestExtension.has_distinct_outputs"),
    "extension_result": ("0012", "v1.engine:EngineCoreOutput.extension_result"),
    "scheduler_provider": ("0013", "v1.core.sched.provider:register_scheduler_provider"),
    "beam_search_route": (
        "0014",
        "entrypoints.generate.beam_search.route:register_beam_search_route",
    ),
}
"""Each point's patch in the series, and the symbol below ``vllm`` that shows that it is there."""

REGISTERED: dict[tuple[Feature, str], str] = {
    ("speculation", "speculative_methods"): "setup.engine_args:METHODS",
    ("speculation", "request_extension"): "frontend.extension:SPECULATION_REQUESTS",
    ("speculation", "stat_loggers"): "frontend.metrics:stat_loggers",
    ("beam", "request_extension"): "frontend.extension:BEAM_REQUESTS",
    ("beam", "scheduler_provider"): "scheduler.beam_scheduler:scheduler_class",
    ("beam", "beam_search_route"): "frontend.extension:ROUTE",
}
"""What a feature registers, once, where vLLM has the point; relative to ``vllm_trie.vllm_hooks``.
The objects have the interfaces of the patches, and derive from nothing of vLLM's."""

_OF_THE_RUNNER = {
    "backend_overrides", "request_proposer", "draft_trees", "draft_verifier", "proposer_stats",
}  # fmt: skip
"""Points that serve the plugin only together: either all of the runner is vLLM's, or none."""


@functools.cache
def offered(point: str) -> bool:
    """Return whether the installed vLLM has an extension point of :data:`EXTENSION_POINTS`."""
    return all(map(_exists, _OF_THE_RUNNER if point in _OF_THE_RUNNER else [point]))


def _exists(point: str) -> bool:
    try:
        resolve(f"vllm.{EXTENSION_POINTS[point][1]}")
    except (ImportError, AttributeError):
        return False
    return True
