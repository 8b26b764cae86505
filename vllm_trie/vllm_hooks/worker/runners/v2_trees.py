"""Model Runner V2's steps in the terms of :class:`TreeVerifier`, with trees.

Every request with a draft verifies N nodes. A smaller tree is filled up with nodes that no other
node sees and that no walk goes to. The host knows each request's text when a step is prepared, as
it has drafted from it, so that it places the trees; verification and compaction stay on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_trie.attention import prefers_chains
from vllm_trie.vllm_hooks.setup.draft_support import check_layers
from vllm_trie.vllm_hooks.worker.attention.tree_attention import TREE_ATTRIBUTE
from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter
from vllm_trie.vllm_hooks.worker.verification.compaction import (
    CacheGroup,
    cache_groups,
    compact_on_device,
)
from vllm_trie.vllm_hooks.worker.verification.placement import QueryTokens
from vllm_trie.vllm_hooks.worker.verification.tree_sampler import TreeSampler
from vllm_trie.vllm_hooks.worker.verification.tree_walk import NO_PARENT

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

_ALIGNED = 4
"""int32 in 16 bytes."""
_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)
"""vLLM's logits processors. The first one reads positions only, the others also drafts."""


class V2TreeAdapter(V2Adapter):
    """Verifies trees in place of vLLM.

    Attributes:
        draft_rows: token and parent of each row of logits of the step, see :func:`walk_trees`.
    """

    draft_rows: tuple[torch.Tensor, torch.Tensor]
    _slot_mappings: torch.Tensor

    def __init__(self, trees: TreeVerifier, req_states: RequestState, device: torch.device) -> None:
        super().__init__(trees, req_states, device)
        self._cache_groups: list[CacheGroup] = []
        self._takes_chains = False
        self._processors_read_chains = False
        # Of the step that runs: on its way to the host, and arguments of `compact_on_device`.
        self._argmax: np.ndarray | None = None
        self._moves: tuple[torch.Tensor, torch.Tensor] | None = None

    def attach(self, runner: GPUModelRunner) -> None:
        self.runner = runner
        config: Any = runner.compilation_config
        check_layers(runner.vllm_config, config.static_forward_context)
        assert runner.sampler is not None
        assert runner.rejection_sampler is not None
        assert runner.speculative_config is not None
        processors = runner.sampler.logits_processors
        self._processors_read_chains = not all(isinstance(p, _PROCESSORS) for p in processors)
        dtypes: tuple[Any, Any] = (runner.dtype, runner.kv_cache_dtype)
        self._takes_chains = prefers_chains(self._device, *dtypes)
        runner.rejection_sampler = TreeSampler(
            runner.rejection_sampler, runner.speculative_config, self
        )
        state: Any = runner.model_state
        state.prepare_attn = self._hands_trees_on(state.prepare_attn)

    def _hands_trees_on(self, prepare_attn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model state's method whose metadata carries the step's trees."""

        @functools.wraps(prepare_attn)
        def with_trees(*args: Any, **kwargs: Any) -> Any:
            by_layer = prepare_attn(*args, **kwargs)
            tree_batch = self.trees.tree_batch
            if tree_batch is not None:
                for metadata in {id(m): m for m in by_layer.values()}.values():
                    setattr(metadata, TREE_ATTRIBUTE, tree_batch)
            return by_layer

        return with_trees

    def attach_cache(self) -> None:
        layers = self.runner.compilation_config.static_forward_context
        self._cache_groups = cache_groups(self.runner.kv_cache_config, layers)

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        self._slot_mappings, self._argmax, self._moves = slot_mappings, None, None
        if batch.num_draft_tokens == 0:
            return
        num_places = batch.num_draft_tokens_per_req
        assert num_places is not None
        num_computed = np.zeros(batch.num_reqs, dtype=np.int64)
        num_rows = int(batch.cu_num_logits_np[-1])
        # Triton compiles a kernel anew for pointers that are not aligned.
        rows = np.zeros((2, round_up(num_rows, _ALIGNED)), dtype=np.int32)
        draft_tokens, parents = rows
        parents.fill(NO_PARENT)
        trees = list(self.trees.step_trees)
        for index, tree in enumerate(trees):
            if not tree.num_nodes:
                continue
            num_committed = batch.num_scheduled_tokens[index] - num_places[index]
            text_length = self._requests[batch.req_ids[index]].num_tokens
            num_computed[index] = text_length - num_committed
            first = batch.cu_num_logits_np[index] + 1
            nodes = slice(first, first + tree.num_nodes)
            draft_tokens[nodes] = tree.token_ids
            parents[nodes] = tree.parents + 1
            if tree.never_accept is not None:
                parents[nodes][tree.never_accept] = NO_PARENT
            trees[index] = tree.filled_up(num_places[index])
        on_device = async_tensor_h2d(rows, device=self._device)
        self.draft_rows = on_device[0, :num_rows], on_device[1, :num_rows]
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        tokens = QueryTokens(starts, num_computed, batch.positions, batch.input_ids)
        self.trees.place(tokens, self._takes_chains, trees)

    def keep_argmax(self, logits: torch.Tensor) -> None:
        """Start the copy of each row's argmax to the host, for drafters that read it."""
        if self.trees.guard.drafter.needs_node_argmax:
            self._argmax = async_copy_to_np(logits.argmax(dim=-1))

    def keep_path(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Note which KV belongs where; for the arguments see :func:`compact_on_device`."""
        if self.trees.tree_batch is not None:
            self._moves = tokens, rows

    def propose(
        self, batch: InputBatch, hidden_states: torch.Tensor, max_nodes: int
    ) -> torch.Tensor:
        if self._moves is not None:  # behind the copy of the step's output
            compact_on_device(self._cache_groups, list(self._slot_mappings), *self._moves)
        return super().propose(batch, hidden_states, max_nodes)

    def _needs_chain(self, params: SamplingParams) -> bool:
        return (
            self._processors_read_chains
            or bool(params.bad_words)
            or params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def _node_argmax(self, batch: InputBatch) -> list[int] | None:
        if self._argmax is None:
            return None
        argmax: list[int] = self._argmax[self._drafted_rows(batch)].tolist()
        return argmax
