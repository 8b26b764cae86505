"""Options of requests, and sampling parameters that are exact with trees."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.frontend.request_options import refusing_what_fails, with_packed_options
from vllm_trie.hooks.ledger.record import Result, Symbols

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

_samples_as_plain: ContextVar[bool] = ContextVar("samples_as_plain", default=False)
"""Whether the engine of the request that is being checked samples as without speculation."""


@Symbols("v1.engine.input_processor:InputProcessor.", "requests can opt out of speculation").wraps(
    "process_inputs",
    "checks and packs options where a bad value is an error of one request",
)
def process_speculation(
    original: Callable[..., Result],
    self: InputProcessor,
    request_id: str,
    prompt: object,
    params: object,
    *args: object,
    **kwargs: object,
) -> Result:
    with refusing_what_fails():
        params = with_packed_options(self.vllm_config, params, self.tokenizer)
        token = _samples_as_plain.set(_walks_trees(self.vllm_config))
    try:
        return original(self, request_id, prompt, params, *args, **kwargs)
    finally:
        _samples_as_plain.reset(token)


def _walks_trees(vllm_config: VllmConfig) -> bool:
    return config.read(vllm_config) is not None and config.verification(vllm_config) == "tree"


@Symbols("sampling_params:SamplingParams.").wraps(
    "_validate_spec_decode",
    "min_p and logit_bias are exact where trees verify",
    until="vLLM's rejection sampler applies logits processors",
)
def validate_spec_decode(
    original: Callable[..., None], self: SamplingParams, speculative_config: object
) -> None:
    """Allow ``min_p`` and ``logit_bias`` where trees verify drafts.

    vLLM's rejection sampler does not apply them. A walk down a tree calls vLLM's own sampler with
    the whole batch, as without speculation.
    """
    if not _samples_as_plain.get():
        original(self, speculative_config)
