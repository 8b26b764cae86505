"""What the check at a start says to Model Runner V2 with faults, each put in on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.drafts.engine.runners.v2 import DraftedOnly, RunnerV2Mixin
from vllm_trie.extras.device_checks import start_check
from vllm_trie.lab.local_engine import runner_of

Patch = pytest.MonkeyPatch


def _in_batch(patch: Patch, change: Callable[[Any, torch.Tensor], None]) -> None:
    """Change each batch with drafts and its KV slots."""
    stock = GPUModelRunner.prepare_attn

    def prepare_attn(self: Any, input_batch: Any) -> Any:
        prepared = stock(self, input_batch)
        if self.adapter.is_drafting and input_batch.num_draft_tokens:
            change(input_batch, prepared[1])
        return prepared

    patch.setattr(GPUModelRunner, "prepare_attn", prepare_attn)


def _wrong_positions(patch: Patch) -> None:
    def change(batch: Any, slot_mappings: torch.Tensor) -> None:
        batch.positions[batch.logits_indices[batch.expanded_local_pos > 0]] += 1

    _in_batch(patch, change)


def _stale_kv(patch: Patch) -> None:
    """The token after an accepted part does not overwrite the rejected one's KV."""

    def change(batch: Any, slot_mappings: torch.Tensor) -> None:
        slot_mappings[:, batch.logits_indices[batch.expanded_local_pos == 0]] = 0

    _in_batch(patch, change)


def _in_sampler(patch: Patch, change: Callable[..., tuple[torch.Tensor, Any]]) -> None:
    stock = DraftedOnly.__call__

    def call(self: Any, logits: torch.Tensor, batch: Any, *rest: Any) -> Any:
        return stock(self, *change(logits, batch), *rest)

    patch.setattr(DraftedOnly, "__call__", call)


def _shifted_rows(patch: Patch) -> None:
    _in_sampler(patch, lambda logits, batch: (logits.roll(1, 0), batch))


def _wrong_sampler_rows(patch: Patch) -> None:
    """Both maps name the other request: where they differ, vLLM's kernels read what none wrote."""

    def change(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, Any]:
        names = "idx_mapping", "expanded_idx_mapping"
        ends = sum(batch.idx_mapping.aminmax())
        return logits, replace(batch, **{name: ends - getattr(batch, name) for name in names})

    _in_sampler(patch, change)


def _shifted_masks(patch: Patch) -> None:
    stock = RunnerV2Mixin.sample

    def sample(self: Any, states: Any, batch: Any, grammar: Any, *rest: Any) -> Any:
        if grammar is not None and batch.num_draft_tokens:
            masks = grammar.grammar_bitmask
            grammar = replace(grammar, grammar_bitmask=masks[[*range(1, len(masks)), 0]])
        return stock(self, states, batch, grammar, *rest)

    patch.setattr(RunnerV2Mixin, "sample", sample)


def _another_ranks_drafts(patch: Patch) -> None:
    """A half of each drafted token's hidden state is that of another token."""
    stock = RunnerV2Mixin.sample

    def sample(self: Any, states: torch.Tensor, batch: Any, *rest: Any) -> Any:
        if batch.num_draft_tokens:
            drafted = batch.logits_indices[batch.expanded_local_pos > 0]
            states = states.clone()
            states[drafted] = (states[drafted] + states[drafted].roll(1, 0)) / 2
        return stock(self, states, batch, *rest)

    patch.setattr(RunnerV2Mixin, "sample", sample)


def _adapters_raise(patch: Patch) -> None:
    stock = RunnerV2Mixin._set_active_loras

    def set_active_loras(self: Any, rows: Any, tokens: Any, *rest: Any) -> None:
        if self.adapter.is_drafting and any(tokens):
            raise RuntimeError(f"adapters of {len(rows)} rows")
        stock(self, rows, tokens, *rest)

    patch.setattr(RunnerV2Mixin, "_set_active_loras", set_active_loras)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "none": lambda patch: None,
    "wrong positions": _wrong_positions,
    "stale KV": _stale_kv,
    "shifted rows": _shifted_rows,
    "shifted masks": _shifted_masks,
    "another rank's drafts": _another_ranks_drafts,
    "wrong sampler rows": _wrong_sampler_rows,
    "adapters raise": _adapters_raise,
}


_run = start_check._Decoder.run
ENGINE = {
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "enable_lora": True,
    "max_lora_rank": 8,
}
"""Options that leave room for the check."""


def run_of_interest(decoder: Any, name: str, *rest: Any, **options: Any) -> Any:
    return None if name == "compiling_plain" else _run(decoder, name, *rest, **options)


def reasons(llm: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Return what the check says, by fault."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    adapter, said = runner_of(llm).adapter, {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start_check, "_slowdown", lambda *runs: None)  # the interpreter's times
            patch.setattr(start_check, "_LONG_PROMPT", 60)
            patch.setattr(start_check, "NUM_TOKENS", 8)
            if name != "none":  # faults are in steps with drafts, and all is compiled
                patch.setattr(start_check._Decoder, "compile", lambda self, num_drafts: None)
                patch.setattr(start_check._Decoder, "run", run_of_interest)
            FAULTS[name](patch)
            adapter._state = "warm-up"
            said[name] = start_check.reason_against_drafts(worker, adapter, agree=lambda why: why)
            assert not runner_of(llm).list_loras()
    return said
