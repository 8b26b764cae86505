"""The speculation options of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError

CACHE_SALT = "vllm_trie_cache_salt"
"""Key of ``SamplingParams.extra_args`` that carries a request's cache salt to the worker."""
SPECULATION = "speculation"
"""Key of ``SamplingParams.extra_args`` that switches a request's drafts off."""


class SpeculationRequestError(VLLMValidationError, ValueError):
    """A request with an option that is not allowed; the server answers 400 with its message."""


def check_request_options(params: Any) -> None:
    """Refuse a request with a speculation option that is not allowed.

    Raises:
        SpeculationRequestError: naming the option, its value and what is allowed.
    """
    extra = getattr(params, "extra_args", None) or {}
    if CACHE_SALT in extra:
        raise SpeculationRequestError(
            f"extra_args[{CACHE_SALT!r}] is for vllm-trie's own use; leave it out, and give the "
            "request a cache_salt"
        )
    value = extra.get(SPECULATION, True)
    # JSON's booleans reach vLLM's extra arguments as 0 and 1.
    if not isinstance(value, int | float) or value not in (0, 1):
        raise SpeculationRequestError(
            f"extra_args[{SPECULATION!r}]={value!r} must be true (the default) or false; false "
            "decodes the request without drafts"
        )


def wrap_process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check requests where every request of every front end passes."""

    @functools.wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_request_options(params)
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


class DraftingLimits(NamedTuple):
    """Bounds on a request's next tree."""

    max_nodes: int
    max_depth: int
    chain_only: bool
    cache_salt: str | None


NO_DRAFT = DraftingLimits(0, 0, False, None)


def drafting_limits(
    state: Any, last_token: int, num_tokens: int, max_model_len: int
) -> DraftingLimits:
    """Bounds for a request that has just got new tokens.

    Args:
        state: vLLM's ``CachedRequestState``.
        last_token: the newest token; it is committed, its KV is not computed yet.
        num_tokens: prompt and output tokens so far.
        max_model_len: length limit; nodes take slots up to it, one of which is the next step's
            bonus token's.
    """
    params = state.sampling_params
    if params is None or state.prompt_token_ids is None:  # pooling, or a prompt of embeddings
        return NO_DRAFT
    extra = params.extra_args or {}
    if not extra.get(SPECULATION, True):
        return NO_DRAFT
    if params.thinking_token_budget is not None:
        return NO_DRAFT  # vLLM counts thinking tokens along a chain
    num_output = len(state.output_token_ids)
    if last_token in params.all_stop_token_ids and num_output >= params.min_tokens:
        return NO_DRAFT  # the scheduler is about to end it
    room = max_model_len - num_tokens - 1
    depth = room
    if params.max_tokens is not None:
        depth = min(depth, params.max_tokens - num_output - 1)
    return DraftingLimits(
        max_nodes=room,
        max_depth=depth,
        chain_only=params.structured_outputs is not None,
        cache_salt=_shared_with(state, extra),
    )


def _shared_with(state: Any, extra: Mapping[str, Any]) -> str | None:
    """The salt that tells whose text the request may draft from.

    Adapters keep their text to themselves, as they do in vLLM's prefix cache: another's says little
    about what this one writes, and its speed nothing about what another's requests said.
    """
    # A patched vLLM brings the salt by itself.
    salt: str | None = getattr(state, "cache_salt", None) or extra.get(CACHE_SALT)
    adapter = getattr(state, "lora_request", None)
    return salt if adapter is None else f"{adapter.lora_name}\0{salt or ''}"
