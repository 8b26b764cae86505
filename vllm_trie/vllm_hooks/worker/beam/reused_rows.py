"""Rows that go on as children of other rows, in Model Runner V1's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from vllm_trie.vllm_hooks.scheduler.row_steps import ReusedRows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


def change_rows(
    requests: Mapping[str, CachedRequestState], batch: InputBatch, reused: ReusedRows
) -> None:
    """Replace the generated tokens of rows, in the states of requests and in the batch.

    A row that was sent with all its tokens as its prompt has generated tokens there, too.
    """
    first = reused.prompt_len
    places, in_batch = [], []
    for i, row_id in enumerate(reused.row_ids):
        state = requests[row_id]
        prompt, token_ids = state.prompt_token_ids, reused.token_ids[i]
        assert prompt is not None
        num_sent = len(prompt) - first
        if num_sent:
            # Not in place: the array may be the scheduler's.
            state.prompt_token_ids = np.concatenate([prompt[:first], token_ids[:num_sent]])
        state.output_token_ids[:] = token_ids[num_sent:].tolist()
        place = batch.req_id_to_index.get(row_id)
        if place is not None:
            places.append(place)
            in_batch.append(i)
    end = first + reused.token_ids.shape[1]
    batch.token_ids_cpu[places, first:end] = reused.token_ids[in_batch]
