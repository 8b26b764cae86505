"""Native beam search and its schedulers at the extension points of a patched vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.entrypoints.generate.beam_search.route import (  # type: ignore[import-not-found]
    BeamSearchRoute,
    register_beam_search_route,
)
from vllm.v1.core.sched.provider import (  # type: ignore[import-not-found]
    register_scheduler_provider,
)

from vllm_trie.vllm_hooks.frontend import offline_beam as offline
from vllm_trie.vllm_hooks.frontend import online_beam as online


class TrieBeamSearch(BeamSearchRoute):
    """Beam searches as one request each, searched by the scheduler."""

    def search_offline(self, llm: Any, *arguments: Any) -> Any:
        return offline.native_beam_search(llm, *arguments)

    def search_online(self, serving: Any, *arguments: Any) -> AsyncGenerator[Any, None] | None:
        # The priority, which comes last, since vLLM 0.33.
        *search, priority = arguments if len(arguments) == 7 else (*arguments, 0)
        return online.native_beam_search(serving, *search, priority=priority)


def register_scheduler() -> None:
    """Provide the schedulers with beam search."""

    def provide(scheduler_config: SchedulerConfig) -> type:
        # Not before an engine asks: front ends need no scheduler.
        from vllm_trie.vllm_hooks.scheduler.beam_scheduler import scheduler_class

        return scheduler_class(scheduler_config)

    register_scheduler_provider(provide)


def register_route() -> None:
    """Take over beam searches."""
    register_beam_search_route(TrieBeamSearch())
