"""A batch's requests as drafters see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_trie.drafters import DraftRequest
from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT, SPECULATION

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class DraftingLimits(NamedTuple):
    """Bounds on a request's next tree."""

    max_nodes: int
    max_depth: int
    chain_only: bool
    cache_salt: str | None


NO_DRAFT = DraftingLimits(0, 0, False, None)


def draft_requests(
    batch: InputBatch,
    states: Mapping[str, CachedRequestState],
    new_tokens: Sequence[Sequence[int]],
    max_model_len: int,
    max_nodes: int,
) -> dict[int, DraftRequest]:
    """Return the requests that get a tree, by batch index.

    Args:
        batch: Model Runner V1's, with the new tokens.
        states: of each request, by its id.
        new_tokens: of each request of the batch; none while its prefill goes on.
        max_model_len: length limit of a request.
        max_nodes: the scheduler's limit on a draft.
    """
    requests = {}
    for index, tokens in enumerate(new_tokens):
        if not tokens:
            continue
        request_id = batch.req_ids[index]
        num_tokens = int(batch.num_tokens_no_spec[index])
        limits = drafting_limits(states[request_id], tokens[-1], num_tokens, max_model_len)
        most_nodes = min(max_nodes, limits.max_nodes)
        if most_nodes <= 0 or limits.max_depth <= 0:
            continue
        token_ids = batch.token_ids_cpu[index, :num_tokens]
        # A drafter that writes to the view fails instead of changing the request.
        token_ids.flags.writeable = False
        requests[index] = DraftRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=int(batch.num_prompt_tokens[index]),
            max_nodes=most_nodes,
            max_depth=limits.max_depth,
            chain_only=limits.chain_only,
            cache_salt=limits.cache_salt,
        )
    return requests


def drafting_limits(
    state: CachedRequestState, last_token: int, num_tokens: int, max_model_len: int
) -> DraftingLimits:
    """Return the bounds for a request that has just got new tokens.

    Args:
        state: of the request.
        last_token: the newest token; it is committed, its KV is not computed yet.
        num_tokens: prompt and output tokens so far.
        max_model_len: length limit; nodes take slots up to it, except for the slot of the next
            step's bonus token.
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
    # A patched vLLM has the salt in the state.
    salt: str | None = getattr(state, "cache_salt", None) or extra.get(CACHE_SALT)
    if state.lora_request is not None:
        # As in vLLM's prefix cache, requests of different adapters share no text: it would say
        # little about the other's output, and one's speed would reveal the other's text.
        salt = f"{state.lora_request.lora_name}\0{salt or ''}"
    return DraftingLimits(room, depth, params.structured_outputs is not None, salt)
