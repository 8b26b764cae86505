"""A batch's requests as drafters see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_trie.drafters import DraftRequest, VerifiedStep
from vllm_trie.vllm_hooks.frontend.request_options import drafting_limits


def draft_requests(
    runner: Any,
    new_tokens: Sequence[Sequence[int]],
    max_nodes: int,
    last_steps: Mapping[str, VerifiedStep],
) -> dict[int, DraftRequest]:
    """The requests that shall get a tree, by batch row.

    Args:
        runner: vLLM's model runner, with the new tokens in its batch.
        new_tokens: what each batch row has just got; nothing if its prefill goes on.
        max_nodes: the scheduler's limit on a draft.
        last_steps: what the last verification found, by request id.
    """
    batch, states, max_model_len = runner.input_batch, runner.requests, runner.max_model_len
    requests = {}
    for row, tokens in enumerate(new_tokens):
        if not tokens:
            continue
        request_id = batch.req_ids[row]
        num_tokens = int(batch.num_tokens_no_spec[row])
        limits = drafting_limits(states[request_id], tokens[-1], num_tokens, max_model_len)
        most_nodes = min(max_nodes, limits.max_nodes)
        if most_nodes <= 0 or limits.max_depth <= 0:
            continue
        token_ids = batch.token_ids_cpu[row, :num_tokens]
        # A drafter that writes to the view fails instead of changing the request.
        token_ids.flags.writeable = False
        requests[row] = DraftRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=int(batch.num_prompt_tokens[row]),
            max_nodes=most_nodes,
            max_depth=limits.max_depth,
            chain_only=limits.chain_only,
            last_step=last_steps.get(request_id),
            cache_salt=limits.cache_salt,
        )
    return requests
