"""Ordinary requests that decode an item, in the worker: all other tokens are masked.

The mask comes before the sampler, so that greedy decoding, sampling, penalties and
log-probabilities see the valid tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_trie.items import ROOT, ItemTrie
from vllm_trie.items.selection import SelectedTrie, view
from vllm_trie.vllm_hooks.wire import DECODING_KEY, Decoding

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)


class _Request(NamedTuple):
    trie: ItemTrie | SelectedTrie | None
    eos_token_id: int


class DecodedItems:
    """Owner of the requests of a worker that decode an item."""

    def __init__(self, open_trie: Callable[[str, str, str], ItemTrie]) -> None:
        self._open_trie = open_trie
        self._requests: dict[str, _Request] = {}

    def update(self, output: SchedulerOutput, batch: InputBatch) -> None:
        """Take the requests of a step in, and drop finished ones."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            extra = (params.extra_args or {}) if params is not None else {}
            if DECODING_KEY in extra:
                self._requests[new.req_id] = self._opened(extra[DECODING_KEY])
                # Under asynchronous scheduling vLLM fills in sampled tokens only if told so.
                batch.logitsprocs_need_output_token_ids = True

    def _opened(self, decoding: Decoding) -> _Request:
        try:
            trie = self._open_trie(decoding.path, decoding.memory, decoding.version)
            valid = view(trie, decoding.selection)
        except Exception as error:  # the scheduler ends the request
            logger.error("A request finds no item: %s", error)
            return _Request(None, decoding.eos_token_id)
        return _Request(valid, decoding.eos_token_id)

    def mask(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Give invalid tokens of these requests the logit -inf, in place.

        Args:
            logits: float[requests of the batch, vocabulary].
            batch: The batch.
        """
        if not self._requests:
            return
        batch.update_async_output_token_ids()
        for request_id, request in self._requests.items():
            place = batch.req_id_to_index.get(request_id)
            if place is not None:
                valid = torch.from_numpy(_valid(request, batch.req_output_token_ids[place] or []))
                row = logits[place]
                kept = row[valid.to(row.device)]
                row.fill_(-torch.inf)
                row[valid.to(row.device)] = kept


def _valid(request: _Request, token_ids: list[int]) -> np.ndarray:
    """Return int64[...], the tokens that may follow; EOS where nothing may."""
    trie, eos = request.trie, request.eos_token_id
    if trie is not None:
        node = trie.find(np.array(token_ids, dtype=np.int64))
        if node is not None:
            nodes = np.array([node])
            tokens = trie.children(nodes).token_ids.astype(np.int64)
            if not len(tokens) or (node != ROOT and trie.is_terminal(nodes)[0]):
                tokens = np.append(tokens, eos)
            return tokens
    return np.array([eos])
