"""What a trained drafter's passes keep, inside CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_trie.drafts.ngrams.native import ROW_TOKENS
from vllm_trie.extras.union import speculator_heads
from vllm_trie.extras.union.speculator_heads import SpeculatorHeads

NUM_ROWS, WIDTH = 4, 3
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that keeps the ids of rows as their likeliest tokens, and returns all that
    is kept: int32 [rows and one more, heads, ROW_TOKENS]."""
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(speculator_heads, "likeliest_on_device", lambda rows: (rows.int(), rows))

    def kept(device: torch.device, rows: list[int], draft_step: Any) -> torch.Tensor:
        speculator = SimpleNamespace(
            method="eagle",
            draft_tokens=torch.zeros(NUM_ROWS, WIDTH, device=device),
            device=device,
            propose=None,
            init_cudagraph_manager=None,
        )
        heads = SpeculatorHeads(speculator, SimpleNamespace())  # type: ignore[arg-type]
        logits = torch.arange(1.0, len(rows) + 1, device=device)
        speculator._maybe_predict_acceptance(
            logits[:, None].repeat(1, ROW_TOKENS),
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(draft_step, device=device),
        )
        return heads._tokens

    return kept


@pytest.mark.parametrize("draft_step", [1, [0, 1, 2]])
def test_predictions_are_kept_by_request_and_position(keep: Any, draft_step: Any):
    """The last row is that of requests which only fill a graph, of index -1."""
    tokens = keep(CPU, [2, 0, -1], draft_step)
    places = [1, 1, 1] if draft_step == 1 else draft_step
    expected = torch.zeros(NUM_ROWS + 1, WIDTH, dtype=torch.int32)
    for value, (row, place) in enumerate(zip((2, 0, NUM_ROWS), places, strict=True), 1):
        expected[row, place] = value
    assert torch.equal(tokens, expected[..., None].expand_as(tokens))


@pytest.mark.parametrize("draft_step", [1, [0, 1, 2]])
def test_nothing_is_read_while_a_graph_is_captured(keep: Any, draft_step: Any):
    """Meta tensors have no values to read, as those of a captured graph have none yet."""
    assert keep(META, [2, 0, -1], draft_step).device == META
