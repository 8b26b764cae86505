"""Options of requests, and sampling parameters that are exact with trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.frontend.request_options import refusing_what_fails, with_packed_options
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.start.additional_config import own_part

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor


@Symbols("v1.engine.input_processor:InputProcessor.", "requests can opt out of speculation").wraps(
    "process_inputs", "checks and packs options where a bad value is an error of one request"
)
def process_speculation(
    original: Callable[..., EngineCoreRequest],
    self: InputProcessor,
    request_id: str,
    prompt: object,
    params: object,
    *args: object,
    **kwargs: object,
) -> EngineCoreRequest:
    """Check and pack a request's options."""
    with refusing_what_fails():
        params = with_packed_options(self.vllm_config, params, self.tokenizer)
    if self.speculative_config is not None and _samples_as_plain(self):
        self.speculative_config = None
    return original(self, request_id, prompt, params, *args, **kwargs)


def _samples_as_plain(processor: InputProcessor) -> bool:
    """Return whether ``min_p`` and ``logit_bias`` are exact, as trees verify drafts.

    vLLM's rejection sampler does not apply them. A walk down a tree calls vLLM's own sampler with
    the whole batch, as without speculation. Only replayed traces do not go with either.
    """
    options = own_part(processor.vllm_config.additional_config)
    verifies_trees = options.get(config.VERIFICATION) == "tree"
    return verifies_trees and not processor.model_config.enable_trace_replay
