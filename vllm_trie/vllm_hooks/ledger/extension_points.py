"""Extension points of a patched vLLM, which the plugin uses in place of run-time hooks.

Stock vLLM has none of them; the patches in ``patches/`` add them one by one, and a vLLM that has
taken one in needs no patch for it. The plugin looks for the points by itself: what is there is
used, for what is missing the run-time hooks stay. No setting is needed. Any first part of the
series will do.
"""

from __future__ import annotations

import functools

from vllm_trie.vllm_hooks.ledger.patch import resolve

EXTENSION_POINTS: dict[str, str] = {
    "speculative_methods": "vllm.v1.spec_decode.method_registry:register_speculative_methods",
    "backend_overrides": "vllm.v1.attention.backends.registry:get_backend_overrides",
    "request_proposer": "vllm.v1.spec_decode.custom_class_proposer:RequestProposer",
    "draft_trees": "vllm.v1.attention.backend:CommonAttentionMetadata.draft_trees",
    "draft_verifier": "vllm.v1.spec_decode.draft_verifier:DraftVerifier",
    "cache_salt": "vllm.v1.worker.gpu_input_batch:CachedRequestState.cache_salt",
    "proposer_stats": "vllm.v1.metrics.stats:SchedulerStats.proposer_stats",
    "stat_loggers": "vllm.v1.metrics.loggers:register_stat_loggers",
    "request_extension": "vllm.plugins.request_extension:register_request_extension",
    "distinct_outputs": "vllm.plugins.request_extension:RequestExtension.has_distinct_outputs",
    "extension_result": "vllm.plugins.request_extension:RequestExtension.complete_output",
    "scheduler_provider": "vllm.v1.core.sched.provider:register_scheduler_provider",
    "fork_request": "vllm.v1.core.kv_cache_manager:KVCacheManager.fork_request",
    "beam_search_route": "vllm.entrypoints.generate.beam_search.route:register_beam_search_route",
}
"""Name of each point, as the ledger uses it, and the symbol that shows that vLLM has it."""

_OF_THE_RUNNER = (
    "backend_overrides",
    "request_proposer",
    "draft_trees",
    "draft_verifier",
    "proposer_stats",
)
"""Points that serve the plugin together only: its mixin is in front of the runner, or it is not."""


@functools.cache
def offered(name: str) -> bool:
    """Whether the installed vLLM has an extension point.

    Args:
        name: one of :data:`EXTENSION_POINTS`.
    """
    return all(map(_exists, _OF_THE_RUNNER if name in _OF_THE_RUNNER else [name]))


def _exists(name: str) -> bool:
    try:
        resolve(EXTENSION_POINTS[name])
    except (ImportError, AttributeError):
        return False
    return True
