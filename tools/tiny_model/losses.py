"""Held-out losses of the training-side model."""

from __future__ import annotations

import numpy as np
import torch

from tools.tiny_model.data.dataset import Ragged
from tools.tiny_model.model import TinyLlama

_ROW = 512


@torch.no_grad()
def _mean_loss(model: TinyLlama, ids: np.ndarray, weights: np.ndarray) -> float:
    cos, sin = model.rotary(_ROW)
    total = count = 0.0
    for start in range(0, len(ids), 8):
        part = torch.from_numpy(ids[start : start + 8].astype(np.int64))
        weight = torch.from_numpy(weights[start : start + 8])[:, 1:]
        nll, _, _ = model(part[:, :-1], part[:, 1:], weight, cos, sin, torch.float32)
        total += float(nll) * float(weight.sum())
        count += float(weight.sum())
    return total / count


def held_out_losses(
    model: TinyLlama, plain: np.ndarray, documents: Ragged, rows: int = 64
) -> dict[str, float]:
    """Nats per token in float32, on plain code and on the answers of task documents.

    Args:
        plain: tokens of files, one after the other; ``rows`` spans of 512 are taken evenly.
        documents: of at most 512 tokens each; the first ``2 * rows`` are taken.
    """
    rows = min(rows, (len(plain) - 1) // _ROW)
    starts = np.linspace(0, len(plain) - _ROW - 1, rows).astype(int)
    spans = np.stack([plain[start : start + _ROW + 1] for start in starts])
    answers = np.zeros((min(2 * rows, len(documents)), _ROW + 1), np.int64)
    weights = np.zeros(answers.shape, np.float32)
    for row in range(len(answers)):
        tokens, split = documents[row]
        answers[row, : len(tokens)] = tokens
        weights[row, split : len(tokens)] = 1.0
    return {
        "plain": _mean_loss(model, spans, np.ones(spans.shape, np.float32)),
        "answers": _mean_loss(model, answers, weights),
    }
