"""Options of requests, and sampling parameters that are exact with trees."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.frontend.request_options import refusing_what_fails, with_packed_options
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.start.additional_config import own_part
from vllm_trie.hooks.wire import CACHE_SALT, extra_args_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor


@Symbols("v1.engine.input_processor:InputProcessor.", "requests can opt out of speculation").wraps(
    "process_inputs",
    "checks and packs options where a bad value is an error of one request; sends cache salts to "
    "the worker",
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
    """Check and pack a request's options, and add its cache salt to them.

    Drafters that learn from finished requests must know whose text they may use.
    """
    with refusing_what_fails():
        params = with_packed_options(self.vllm_config, params, self.tokenizer)
    if self.speculative_config is not None and _samples_as_plain(self):
        self.speculative_config = None
    request = original(self, request_id, prompt, params, *args, **kwargs)
    if request.cache_salt and request.sampling_params is not None:
        request.sampling_params = salted = copy(request.sampling_params)  # it may be the client's
        salted.extra_args = {**extra_args_of(salted), CACHE_SALT: request.cache_salt}
    return request


def _samples_as_plain(processor: InputProcessor) -> bool:
    """Return whether ``min_p`` and ``logit_bias`` are exact, as trees verify drafts.

    vLLM's rejection sampler does not apply them. A walk down a tree calls vLLM's own sampler with
    the whole batch, as without speculation. Only replayed traces do not go with either.
    """
    options = own_part(processor.vllm_config.additional_config)
    verifies_trees = options.get(config.VERIFICATION) == "tree"
    return verifies_trees and not processor.model_config.enable_trace_replay
