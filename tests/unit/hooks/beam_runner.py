"""What :class:`BeamSlots` needs of vLLM's Model Runner V2, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from vllm_trie.searches.engine.search_wire import BEAM_STEPS, BeamStep
from vllm_trie.searches.engine.worker import beams_v2

NUM_BLOCKS = 500
"""Of the KV caches."""


class BeamRunner:
    """The states of a runner with one KV cache group, and its beams.

    Args:
        device: Of its tensors.
        kv_caches: [NUM_BLOCKS, ...] of each layer.
        num_slots: Of request states.
    """

    def __init__(
        self, device: torch.device, kv_caches: list[torch.Tensor], num_slots: int = 64
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
            return SimpleNamespace(gpu=torch.zeros(shape, dtype=dtype, device=device))

        self.device, self.kv_caches = device, kv_caches
        self.kv_cache_config = SimpleNamespace(num_blocks=NUM_BLOCKS)
        self.model_state = SimpleNamespace()
        self.main_stream = self.output_copy_stream = SimpleNamespace(wait_stream=lambda _: None)
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            num_computed_tokens_np=np.zeros(num_slots, dtype=np.int32),
            num_computed_tokens=zeros(num_slots),
            total_len=zeros(num_slots),
            last_sampled_tokens=zeros(num_slots, 1, dtype=torch.int64).gpu,
        )
        num_blocks = SimpleNamespace(np=np.zeros((1, num_slots), dtype=np.int32))
        self.block_tables = SimpleNamespace(
            block_tables=[zeros(num_slots, 32)], num_blocks=num_blocks
        )
        self._free = np.random.default_rng(0).permutation(num_slots).tolist()
        self.beams = beams_v2.BeamSlots(self)  # type: ignore[arg-type]
        if device.type == "cpu":  # without Triton
            self.beams._copier = SimpleNamespace(copy=self._copy)  # type: ignore[assignment]

    def _copy(self, copies: torch.Tensor) -> None:
        """Do what a kernel does on a device."""
        for cache in {cache.data_ptr(): cache for cache in self.kv_caches}.values():
            cache[copies[1]] = cache[copies[0]]

    def begin_step(
        self, steps: Sequence[BeamStep], selections: Sequence[Any], ended: Sequence[str] = ()
    ) -> list[str]:
        """Take a step's beams in; return their names in the order of the batch."""
        step: Any = SimpleNamespace(
            finished_req_ids={*ended},
            scheduled_new_reqs=[],
            num_scheduled_tokens={},
            kv_cache_block_copies=None,
        )
        setattr(step, BEAM_STEPS, steps)
        step = self.beams.add_to(step)
        for request in step.scheduled_new_reqs:
            self.req_states.req_id_to_index[request.req_id] = self._free.pop()
        self.beams.write()
        self.beams.selector.selections = list(selections)
        return [*step.num_scheduled_tokens]

    def select(self, names: Sequence[str], logits: torch.Tensor) -> None:
        """Select the candidates of a step, from a row of logits for each name."""
        rows = SimpleNamespace(req_ids=names, cu_num_logits_np=np.arange(len(names) + 1))
        with patch.object(beams_v2, "stream", lambda *streams: nullcontext()):
            self.beams.select(logits, rows)  # type: ignore[arg-type]
