"""A batch's requests as drafters see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_trie.drafts import DraftRequest
from vllm_trie.hooks.wire import CACHE_SALT, RequestData

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def constant_fields(request_id: str, data: RequestData, num_prompt_tokens: int) -> dict[str, Any]:
    """Return what stays the same of a request as drafters see it, by field of `DraftRequest`.

    Args:
        request_id: The engine's.
        data, num_prompt_tokens: Of the request, which has sampling parameters.
    """
    params = data.sampling_params
    assert params is not None
    extra_args = params.extra_args or {}
    return {
        "request_id": request_id,
        "num_prompt_tokens": num_prompt_tokens,
        "cache_salt": _cache_salt(data, extra_args),
        "sample_of": _sample_of(request_id),
        "is_sampled": params.temperature > 0.0,
        "extra_args": extra_args,
    }


def draft_request(
    constant: Mapping[str, Any],
    params: SamplingParams,
    token_ids: np.ndarray,
    num_output_tokens: int,
    max_model_len: int,
    max_nodes: int,
    chain_only: bool,
) -> DraftRequest | None:
    """Return a request that has just got new tokens, and goes on, as drafters see it; None if there
    is no room for a draft.

    Args:
        constant: See :func:`constant_fields`.
        params: Of the request.
        token_ids: int32 [num_tokens], prompt and output; a read-only view.
        num_output_tokens: Of the request.
        max_model_len: Length limit. Nodes take slots up to it, except for the slot of the next
            step's bonus token.
        max_nodes: The scheduler's limit on a draft.
        chain_only: Whether all drafts are chains; those of structured outputs and with a thinking
            budget always are, which vLLM checks along a chain.
    """
    room = max_depth = max_model_len - len(token_ids) - 1
    if params.max_tokens is not None:
        max_depth = min(room, params.max_tokens - num_output_tokens - 1)
    if min(max_nodes, max_depth) <= 0:
        return None
    return DraftRequest(
        token_ids=token_ids,
        max_nodes=min(max_nodes, room),
        max_depth=max_depth,
        chain_only=chain_only
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None,
        **constant,
    )


def ended_request(
    constant: Mapping[str, Any], params: SamplingParams, token_ids: np.ndarray
) -> DraftRequest:
    """Return a request that has ended as drafters see it.

    Args:
        constant: See :func:`constant_fields`.
        params: Of the request.
        token_ids: int32 [num_tokens], prompt and output; what a step computed behind the token that
            ended the request is left out. Empty where the request never gets drafts: it may end a
            session that had some, which drafters have to forget.
    """
    first = constant["num_prompt_tokens"]
    stops = [params.eos_token_id, *(params.stop_token_ids or ())]
    ends = np.flatnonzero(np.isin(token_ids[first:], [stop for stop in stops if stop is not None]))
    if len(ends):
        token_ids = token_ids[: first + ends[0] + 1]
    return DraftRequest(token_ids=token_ids, max_nodes=0, max_depth=0, **constant)


def ends_with(params: SamplingParams, token: int) -> bool:
    """Return whether the scheduler ends a request after a token.

    Args:
        params: Of the request. Its `all_stop_token_ids` name EOS even where `ignore_eos` is set.
        token: The newest. Before `min_tokens` vLLM samples none that ends the request.
    """
    return token == params.eos_token_id or token in (params.stop_token_ids or ())


def _cache_salt(data: RequestData, extra_args: Mapping[str, str]) -> str | None:
    """Return the salt that requests must share to profit from one another's text.

    As in vLLM's prefix cache, requests of different adapters share no text: it would say little
    about the other's output, and a request's speed would reveal the other's text.
    """
    salt = extra_args.get(CACHE_SALT)
    adapter = data.lora_request
    if adapter is not None:  # the length says where its name ends
        return f"\0{len(adapter.lora_name)}:{adapter.lora_name}{salt or ''}"
    return f"\0:{salt}" if salt and salt[0] == "\0" else salt


def _sample_of(request_id: str) -> str | None:
    """Return what the ids of the samples that ``n`` asks for share, None for any other request."""
    index, _, parent_id = request_id.partition("_")  # see vLLM's ParentRequest
    return parent_id if index.isdecimal() and parent_id else None
