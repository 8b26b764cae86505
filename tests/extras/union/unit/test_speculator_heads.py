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
SCORES = torch.rand(NUM_ROWS, WIDTH, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(speculator_heads, "likeliest_on_device", lambda rows: (rows.int(), rows))


def make_heads(device: torch.device, **fields: object) -> tuple[SpeculatorHeads, Any]:
    """Return heads, and the speculator with these fields that they are of."""
    speculator = SimpleNamespace(
        draft_tokens=torch.zeros(NUM_ROWS, WIDTH, device=device),
        device=device,
        propose=None,
        init_cudagraph_manager=None,
        **fields,
    )
    return SpeculatorHeads(speculator, SimpleNamespace()), speculator  # type: ignore[arg-type]


def keep(device: torch.device, rows: list[int], draft_step: Any) -> torch.Tensor:
    """Keep the ids of rows as their likeliest tokens, and return all that is kept: int32 [rows and
    one more, heads, ROW_TOKENS]."""
    heads, speculator = make_heads(device, method="eagle")
    logits = torch.arange(1.0, len(rows) + 1, device=device)
    speculator._maybe_predict_acceptance(
        logits[:, None].repeat(1, ROW_TOKENS),
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(draft_step, device=device),
    )
    return heads._kept[0]


def keep_candidates(device: torch.device, rows: list[int]) -> list[torch.Tensor]:
    """Keep the candidates 5 and 6 of rows, and return the fields of all that are kept."""
    scores = SCORES.to(device)
    sampler = SimpleNamespace(top_k=2, sample=lambda *_: None, scores=scores[:, :, 0])
    heads, _ = make_heads(device, candidate_sampler=sampler)
    tokens = torch.tensor([[[5, 6]] * WIDTH] * len(rows), device=device)
    mapping = torch.tensor([*rows, 1], device=device).repeat_interleave(WIDTH)
    sampler.sample(tokens, scores[: len(rows)], len(rows), None, mapping)
    return heads._kept


def test_candidates_are_kept_with_their_transitions():
    tokens, probabilities, transitions = keep_candidates(CPU, [2, 0, -1])
    assert tokens[:, 0].tolist() == [[5, 6], [0, 0], [5, 6], [0, 0], [5, 6]]
    for row, place in ((2, 0), (0, 1)):
        of_request = SCORES[place].softmax(-1)
        assert torch.equal(probabilities[row], of_request[:, 0])
        assert torch.equal(transitions[row], of_request[1:])
    assert not probabilities[[1, 3]].any()
    assert not transitions[[1, 3]].any()


def test_no_candidates_are_read_while_a_graph_is_captured():
    assert all(kept.device == META for kept in keep_candidates(META, [2, 0, -1]))


@pytest.mark.parametrize("draft_step", [1, [0, 1, 2]])
def test_predictions_are_kept_by_request_and_position(draft_step: Any):
    """The last row is that of requests which only fill a graph, of index -1."""
    tokens = keep(CPU, [2, 0, -1], draft_step)
    places = [1, 1, 1] if draft_step == 1 else draft_step
    expected = torch.zeros(NUM_ROWS + 1, WIDTH, dtype=torch.int32)
    for value, (row, place) in enumerate(zip((2, 0, NUM_ROWS), places, strict=True), 1):
        expected[row, place] = value
    assert torch.equal(tokens, expected[..., None].expand_as(tokens))


@pytest.mark.parametrize("draft_step", [1, [0, 1, 2]])
def test_nothing_is_read_while_a_graph_is_captured(draft_step: Any):
    """Meta tensors have no values to read, as those of a captured graph have none yet."""
    assert keep(META, [2, 0, -1], draft_step).device == META
