"""What an engine can search natively: why not, and how wide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import BeamSearchParams, SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig

_FORKED = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)

# -- engines ---------------------------------------------------------------------------------------


def unsupported_rule(
    vllm_config: VllmConfig, params: SamplingParams | BeamSearchParams
) -> str | None:
    """Return why the native search cannot serve the grammar of these parameters."""
    if getattr(params, "structured_outputs", None) is not None:
        outputs = vllm_config.structured_outputs_config
        if outputs.reasoning_parser and not outputs.enable_in_reasoning:
            return (
                "structured_outputs is not supported with reasoning_parser="
                f"{outputs.reasoning_parser!r}, after whose reasoning the grammar would begin"
            )
        if params.ignore_eos:
            return "structured_outputs is not supported with ignore_eos: a grammar ends with EOS"
    return None


def beam_slots(vllm_config: VllmConfig) -> int:
    """Return the largest number of requests that the engine runs at once."""
    scheduler = vllm_config.scheduler_config
    return scheduler.max_num_active_seqs or scheduler.max_num_seqs


def cache_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why beams cannot share and copy KV blocks of this cache, None if they can.

    A model's cache says what its configuration may not: only groups that keep tokens of a request,
    one state each, can be forked block by block. On Model Runner V2 a drafter of vLLM's takes beams
    for requests and writes behind their last blocks, to what was in a block table before: where
    groups share memory, the model's KV may be there. One that drafts in parallel has inputs for a
    step's tokens, and beams would have more.
    """
    if vllm_config.use_v2_model_runner and vllm_config.num_lookahead_tokens:
        speculative: Any = vllm_config.speculative_config
        if speculative.parallel_drafting:
            return f"the drafter {speculative.method!r}, which drafts in parallel, is not supported"
        if len(kv_cache_config.kv_cache_groups) > 1:
            return "a drafter with KV of its own is not supported where layers differ in kind"
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}
        for layer_spec in specs.values():
            if type(layer_spec) not in _FORKED:
                return f"KV cache of kind {type(layer_spec).__name__} is not supported"
            if getattr(layer_spec, "tokens_per_state", 1) != 1:
                return "compressed KV cache (several tokens in one state) is not supported"
    return None


# -- requests --------------------------------------------------------------------------------------


class BeamRequestError(VLLMValidationError, ValueError):
    """A beam request that cannot be served; the server answers 400 with its message."""


def check_blocks(
    needed: int, num_prompt_tokens: int, beam_width: int, block_size: int, blocks: int
) -> None:
    """Refuse a search that needs more KV blocks, of `block_size` tokens, than an engine has.

    Raises:
        BeamRequestError: `needed` is above `blocks`.
    """
    if needed > blocks:
        raise BeamRequestError(
            f"beam_width={beam_width} with a prompt of {num_prompt_tokens} tokens needs at "
            f"least {needed} KV blocks of {block_size} tokens, the engine has {blocks}; "
            "lower beam_width, shorten the prompt or give the engine more KV cache memory"
        )


def min_blocks(
    num_prompt_tokens: int, beam_width: int, max_new_tokens: int, block_size: int
) -> int:
    """Return the fewest blocks of one KV cache group with which a search can take its steps.

    After the first fork every beam has a block of its own behind the prompt's full blocks.
    """
    full, tail = divmod(num_prompt_tokens, block_size)
    if max_new_tokens <= 1 or beam_width == 1:
        return full + bool(tail) + (max_new_tokens > 1 and not tail)
    return full + beam_width
