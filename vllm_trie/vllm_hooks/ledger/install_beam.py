"""Put native beam search into the vLLM of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.logger import init_logger

from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.ledger.patch import resolve
from vllm_trie.vllm_hooks.setup.beam_support import switched_off

logger = init_logger(__name__)

_MARK = "_vllm_trie_original"


def install() -> None:
    """Wrap vLLM's entrances to beam search; calling it again does nothing.

    With ``VLLM_TRIE_BEAM=0`` only requests with ``beam_width`` are still recognized, to say that
    the native search is off; everything else stays vLLM's own.
    """
    from vllm_trie.vllm_hooks.frontend import beam_requests as frontend
    from vllm_trie.vllm_hooks.frontend import offline_beam as offline
    from vllm_trie.vllm_hooks.frontend import online_beam as online

    # Each hook stays away where a patched vLLM has an extension point for it.
    if offered("request_extension"):
        from vllm_trie.vllm_hooks.frontend import request_extensions as requests

        requests.register_beam()
    else:
        _wrap(
            "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
            frontend.wrap_process_inputs,
        )
    if not offered("distinct_outputs"):
        _wrap(
            "vllm.sampling_params:SamplingParams._verify_greedy_sampling",
            frontend.wrap_verify_greedy_sampling,
        )
    if switched_off():
        return
    if offered("scheduler_provider"):
        from vllm_trie.vllm_hooks.frontend import beam_extensions as beam

        beam.register_scheduler()
    else:
        _wrap("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", wrap_get_scheduler_cls)
    if not offered("extension_result"):
        state = "vllm.v1.engine.output_processor:RequestState"
        _wrap(f"{state}.make_request_output", frontend.wrap_make_request_output)
        _wrap(f"{state}._new_completion_output", frontend.wrap_new_completion_output)
    if offered("beam_search_route"):
        from vllm_trie.vllm_hooks.frontend import beam_extensions as beam

        beam.register_route()
    else:
        search = "vllm.entrypoints.generate.beam_search"
        _wrap(f"{search}.offline:BeamSearchOfflineMixin.beam_search", offline.wrap_beam_search)
        _wrap(f"{search}.online:BeamSearchOnlineMixin.beam_search", online.wrap_beam_search)
    for request in (
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    ):
        if not offered("beam_search_route"):
            _wrap(f"{request}.to_beam_search_params", online.wrap_to_beam_search_params)
        if not offered("request_extension"):
            _wrap(f"{request}.to_sampling_params", online.wrap_to_sampling_params)


def wrap_get_scheduler_cls(original: Any) -> Any:
    """Our schedulers where the user left ``scheduler_cls`` out."""

    @functools.wraps(original)
    def get_scheduler_cls(self: SchedulerConfig) -> Any:
        if self.scheduler_cls is not None:
            logger.info_once(
                "Native beam search is off: scheduler_cls=%s was given; leave it out to have it. "
                "vLLM's own beam search is used.",
                self.scheduler_cls,
            )
            return original(self)
        from vllm_trie.vllm_hooks.scheduler.beam_scheduler import scheduler_class

        return scheduler_class(self)

    return get_scheduler_cls


def _wrap(target: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace the method that `target` names by `wrapper(method)`, once."""
    owner_name, _, name = target.rpartition(".")
    owner = resolve(owner_name)
    original = owner.__dict__[name]
    if hasattr(original, _MARK):
        return
    wrapped = wrapper(original)
    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped)
