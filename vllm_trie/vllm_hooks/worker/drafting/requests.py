"""A batch's requests as drafters see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_trie.drafters import DraftRequest
from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT, SPECULATION

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


def draft_requests(
    batch: InputBatch,
    states: Mapping[str, CachedRequestState],
    new_tokens: Sequence[Sequence[int]],
    max_model_len: int,
    max_nodes: int,
    chain_only: bool,
) -> dict[int, DraftRequest]:
    """Return the requests that get a draft, by batch index.

    Args:
        batch: Model Runner V1's, with the new tokens.
        states: of each request, by its id.
        new_tokens: of each request of the batch; none while its prefill goes on. The newest is
            committed, its KV is not computed yet.
        max_model_len: length limit. Nodes take slots up to it, except for the slot of the next
            step's bonus token.
        max_nodes: the scheduler's limit on a draft.
        chain_only: whether all drafts are chains; those of structured outputs always are.
    """
    requests = {}
    for index, tokens in enumerate(new_tokens):
        if not tokens:
            continue
        request_id = batch.req_ids[index]
        state = states[request_id]
        if not _may_draft(state, tokens[-1]):
            continue
        num_tokens = int(batch.num_tokens_no_spec[index])
        room = max_depth = max_model_len - num_tokens - 1
        params = state.sampling_params
        assert params is not None
        if params.max_tokens is not None:
            max_depth = min(room, params.max_tokens - len(state.output_token_ids) - 1)
        if min(max_nodes, max_depth) <= 0:
            continue
        token_ids = batch.token_ids_cpu[index, :num_tokens]
        # A drafter that writes to the view fails instead of changing the request.
        token_ids.flags.writeable = False
        requests[index] = DraftRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=int(batch.num_prompt_tokens[index]),
            max_nodes=min(max_nodes, room),
            max_depth=max_depth,
            chain_only=chain_only or params.structured_outputs is not None,
            cache_salt=_cache_salt(state, params.extra_args or {}),
        )
    return requests


def _may_draft(state: CachedRequestState, last_token: int) -> bool:
    """Whether a request that has just got new tokens may have a draft."""
    params = state.sampling_params
    if params is None or state.prompt_token_ids is None:  # pooling, or a prompt of embeddings
        return False
    if params.extra_args and not params.extra_args.get(SPECULATION, True):
        return False
    if params.thinking_token_budget is not None:
        return False  # vLLM counts thinking tokens along a chain
    num_output = len(state.output_token_ids)
    # After a stop token the scheduler is about to end the request.
    return last_token not in params.all_stop_token_ids or num_output < params.min_tokens


def _cache_salt(state: CachedRequestState, extra_args: Mapping[str, str]) -> str | None:
    """Return the salt that requests must share to profit from one another's text.

    As in vLLM's prefix cache, requests of different adapters share no text: it would say little
    about the other's output, and a request's speed would reveal the other's text.
    """
    # A patched vLLM has the salt in the state.
    salt: str | None = getattr(state, "cache_salt", None) or extra_args.get(CACHE_SALT)
    adapter = state.lora_request
    return salt if adapter is None else f"{adapter.lora_name}\0{salt or ''}"
