"""Train an EAGLE head and a one-layer draft model for the shipped model.

`python -m tools.tiny_model.neural_drafters --data own.jsonl --out FOLDER`

With `--model` an EAGLE head alone, for another Llama with tied embeddings, from its answers as
`vllm-trie corpus synthesize --answers` keeps them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.tiny_model.model import (
    Layer,
    Linear,
    ModelConfig,
    TinyLlama,
    load_model,
    save_config,
    save_model,
)
from vllm_trie.lab.medusa import Backbone, Encoder, TokenRows, read_tokens
from vllm_trie.lab.tiny_model import model_path

_ROW = 512
_HELD_ROWS = 32
_HIDDEN_WEIGHT = 0.2
_FITTED_ROWS = 40
_UNROLLED = 3
"""Passes of the head in training: from the second on it reads its own hidden states."""


class EagleHead(nn.Module):
    """One decoder layer over an embedding and a hidden state (EAGLE, Li et al. 2024, figure 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = Linear(2 * size, size, 0.0)  # set by `Training.fit`
        self.layer = Layer(config)
        self.layer.input_layernorm = nn.Identity()  # as in the format that vLLM loads

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the hidden states one place further; all `[rows, tokens, hidden_size]`."""
        y, _ = self.layer(self.fc(torch.cat((embedded, hidden), -1)), cos, sin)
        return y


class Training:
    """Both drafters on the same batches; their model stays frozen.

    Args:
        model: its folder.
        lr: peak learning rate.
        seed: of the first weights, and of the places where the head is scored.
        with_draft: train the draft model too.
        scored: share of the places at which the head's loss is taken. Their logits are most of
            the work where the vocabulary is large.
    """

    def __init__(
        self, model: Path, lr: float, seed: int, with_draft: bool = True, scored: float = 1.0
    ) -> None:
        torch.manual_seed(seed)
        self.target = load_model(model).requires_grad_(False)
        config = self.target.config
        self.head = EagleHead(config)
        self.draft: TinyLlama | None = None
        if with_draft:
            self.draft = TinyLlama(replace(config, num_layers=1))
            state = self.target.state_dict()
            self.draft.load_state_dict({name: state[name] for name in self.draft.state_dict()})
        self.cos, self.sin = self.target.rotary(_ROW)
        self.lr, self.scored = lr, scored
        self.modules = [module for module in (self.head, self.draft) if module is not None]
        self.optimizer = torch.optim.AdamW(
            [weight for module in self.modules for weight in module.parameters()],
            lr=lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
        )

    @torch.no_grad()
    def fit(self, rows: Iterable[Tensor]) -> None:
        """Set `fc` by least squares: most of what the head learns, in half a minute.

        Args:
            rows: each int64 [1, tokens].
        """
        size = self.target.config.hidden_size
        inputs = torch.eye(2 * size, dtype=torch.float64)  # a ridge of one
        outputs = torch.zeros(2 * size, size, dtype=torch.float64)
        for ids in rows:
            hidden = self.target.hidden(ids, self.cos, self.sin, torch.bfloat16)[0].double()
            embedded = F.embedding(ids[0, 1:], self.target.embed_tokens).double()
            read = torch.cat((embedded, hidden[:-1]), -1)
            inputs += read.T @ read
            outputs += read.T @ hidden[1:]
        self.head.fc.weight.copy_(torch.linalg.solve(inputs, outputs).T)

    def step(self, number: int, progress: float, ids: Tensor) -> tuple[float, float]:
        """Train on one batch, int64 [rows, tokens]; returns both losses, nats.

        `progress` is the share of the training that is done.
        """
        head_losses, draft_loss = self.losses(ids)
        head_loss = sum(head_losses) / len(head_losses)
        (head_loss + draft_loss).backward()
        warm = min(1.0, (number + 1) / 40)
        rate = warm * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * rate
        for module in self.modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(head_loss), float(draft_loss)

    def losses(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the head's loss at each unrolled pass, and the draft model's (0 without one)."""
        dtype = torch.bfloat16
        with torch.no_grad():
            truth = self.target.hidden(ids, self.cos, self.sin, dtype)
            places = torch.rand(_ROW - 1).argsort()[: round(self.scored * (_ROW - 1))]
            expected = self._distribution(truth[:, 1 + places])
        draft_loss = torch.zeros(())
        if self.draft is not None:
            guesses = self.draft.logits(self.draft.hidden(ids, self.cos, self.sin, dtype))
            draft_loss = _cross_entropy(guesses, self._distribution(truth))
        # Row p of the head reads the token at p + 1 and the hidden state at p.
        embedded = F.embedding(ids[:, 1:], self.target.embed_tokens).to(dtype)
        hidden = truth[:, :-1]
        cos, sin = self.cos[: _ROW - 1], self.sin[: _ROW - 1]
        losses = []
        for unrolled in range(_UNROLLED):
            guessed = self.head(embedded, hidden, cos, sin)
            # The first rows of a later pass have no guess to read.
            read = places >= unrolled
            logits = self.target.logits(guessed[:, places[read]])
            loss = _cross_entropy(logits, expected[:, read])
            near = F.smooth_l1_loss(guessed[:, unrolled:].float(), truth[:, 1 + unrolled :].float())
            losses.append(loss + _HIDDEN_WEIGHT * near)
            hidden = torch.cat((truth[:, :1], guessed[:, :-1]), 1)
        return losses, draft_loss

    def _distribution(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden).softmax(-1)

    @torch.no_grad()
    def agreement(self, ids: Tensor) -> dict[str, list[float]]:
        """Return how often each drafter's likeliest token is the model's, by depth for the head."""
        truth = self.target.hidden(ids, self.cos, self.sin)
        answers = self.target.logits(truth).argmax(-1)
        embedded = F.embedding(ids[:, 1:], self.target.embed_tokens)
        hidden, rates = truth[:, :-1], []
        cos, sin = self.cos[: _ROW - 1], self.sin[: _ROW - 1]
        for unrolled in range(_UNROLLED):
            guessed = self.head(embedded, hidden, cos, sin)
            right = self.target.logits(guessed[:, unrolled:]).argmax(-1)
            rates.append((right == answers[:, 1 + unrolled :]).float().mean().item())
            hidden = torch.cat((truth[:, :1], guessed[:, :-1]), 1)
        agreement = {"eagle": rates}
        if self.draft is not None:
            right = self.draft.logits(self.draft.hidden(ids, self.cos, self.sin)).argmax(-1)
            agreement["draft_model"] = [(right == answers).float().mean().item()]
        return agreement

    def save(self, folder: Path) -> None:
        """Write the checkpoints in bfloat16; a head alone goes into `folder` itself."""
        eagle = folder
        if self.draft is not None:
            save_model(self.draft, folder / "weights-draft")
            (folder / "weights-draft" / "generation_config.json").unlink()
            eagle = folder / "weights-eagle"
        save_config(replace(self.target.config, num_layers=1), eagle)
        tensors = {"fc.weight": self.head.fc.weight}
        for name, value in self.head.layer.state_dict().items():
            tensors[f"layers.0.{name}"] = value
        save_file(
            {
                name: value.detach().to(torch.bfloat16).contiguous()
                for name, value in tensors.items()
            },
            str(eagle / "model.safetensors"),
            metadata={"format": "pt"},
        )
        (eagle / "model.safetensors").chmod(0o644)


def _cross_entropy(logits: Tensor, expected: Tensor) -> Tensor:
    return -(expected * logits.log_softmax(-1)).sum(-1).mean()


def main(
    data: Annotated[Path, typer.Option(help=".jsonl file of the model's own texts")],
    out: Annotated[Path, typer.Option(help="folder for the checkpoints")],
    model: Annotated[Path | None, typer.Option(help="in place of the shipped model")] = None,
    steps: Annotated[int, typer.Option()] = 600,
    batch: Annotated[int, typer.Option(help="rows of 512 tokens")] = 4,
    lr: Annotated[float, typer.Option()] = 2e-3,
    scored: Annotated[float, typer.Option(help="share of the places that are scored")] = 1.0,
    minutes: Annotated[float, typer.Option(help="end after so long")] = 14.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train the drafters and write their checkpoints."""
    encoder = Encoder(lambda text: [], lambda question: [], 0)
    if model is not None:
        encoder = Backbone(str(model)).encoder
    tokens = read_tokens([data], encoder)
    tokens = np.where(tokens < 0, ~tokens, tokens)  # questions count like answers
    held, tokens = tokens[: _HELD_ROWS * _ROW], tokens[_HELD_ROWS * _ROW :]
    rows = TokenRows(tokens, _ROW, seed)
    training = Training(model or model_path(), lr, seed, model is None, scored)
    start = time.monotonic()

    def rows_at(row: int, count: int) -> Tensor:
        return torch.from_numpy(rows.batch(row, count).astype(np.int64))

    training.fit(rows_at(row, 1) for row in range(_FITTED_ROWS))
    for number in range(steps):
        ids = rows_at(number * batch, batch)
        spent = (time.monotonic() - start) / 60
        progress = max(number / steps, spent / minutes)
        losses = training.step(number, progress, ids)
        if number % 20 == 0:
            print(f"{number} {spent:.1f} min {losses[0]:.3f} {losses[1]:.3f}", flush=True)
        if progress >= 1.0:
            print(f"stopped at step {number}")
            break
    agreements = [
        training.agreement(torch.from_numpy(row[None].astype(np.int64)))
        for row in held.reshape(-1, _ROW)
    ]
    means = {name: np.mean([a[name] for a in agreements], axis=0) for name in agreements[0]}
    print(json.dumps({name: rates.round(3).tolist() for name, rates in means.items()}))
    training.save(out)


if __name__ == "__main__":
    typer.run(main)
