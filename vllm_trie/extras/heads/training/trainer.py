"""Training, one resumable optimizer step at a time, and evaluation of the heads."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_trie.extras.heads.heads import HeadsShape, MedusaHeads
from vllm_trie.extras.heads.training.backbone import Backbone
from vllm_trie.extras.heads.training.states import StateCache, training_inputs
from vllm_trie.extras.heads.training.text import TokenRows

_IGNORED = -100
_UNLISTED = -1
"""A target that the token map lacks: heads cannot guess it, which counts as wrong."""


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that decides the result besides the model and the text.

    Attributes:
        steps, batch_rows: Optimizer steps, and rows of text in each.
        learning_rate: Its peak; it rises over `warmup_steps` and falls to 0 along a cosine.
    """

    steps: int = 1000
    batch_rows: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 40
    weight_decay: float = 0.01
    seed: int = 0


class HeadScore(NamedTuple):
    """Accuracy of one head on held-out text."""

    top1: float
    """Share of places where its likeliest token is right."""
    top5: float
    nll: float
    """Mean negative log-likelihood, nats."""


def learning_rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return a step's learning rate over its peak: it rises, then falls to 0 along a cosine.

    Args:
        step: Its number, from 0.
        steps: Of the whole training.
        warmup_steps: Until the peak.
    """
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    return warm * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, steps))))


class Trainer:
    """Trains heads in place; :meth:`state` and :meth:`resume` carry it over an interruption.

    Heads learn the tokens that the model itself would take, which drafts are checked against.
    """

    def __init__(
        self,
        backbone: Backbone,
        rows: TokenRows,
        plan: TrainingPlan,
        shape: HeadsShape,
        cache: StateCache | None = None,
    ) -> None:
        """Make heads of `shape`, for the most frequent tokens of `rows` if it has fewer outputs
        than tokens; `cache` keeps the hidden states of `rows`."""
        self.backbone, self.plan = backbone, plan
        self._rows, self._cache = rows, cache
        self._settings = {**asdict(plan), **training_inputs(backbone, rows.rows)}
        self.heads = MedusaHeads(shape).to(backbone.device)
        self._outputs = torch.arange(shape.vocab_size, device=backbone.device)
        output = backbone.output_weight
        if shape.num_outputs < shape.vocab_size:
            token_map = frequent_tokens(rows.rows, shape.vocab_size, shape.num_outputs)
            self.heads.token_map = torch.from_numpy(token_map).to(backbone.device)
            self._outputs.fill_(_UNLISTED)
            self._outputs[self.heads.token_map] = torch.arange(len(token_map)).to(backbone.device)
            output = output[self.heads.token_map]
        with torch.no_grad():
            # Heads start as copies of the model's own output layer, as in the paper.
            self.heads.output_weight.copy_(output.expand_as(self.heads.output_weight))
        if shape.shares_output:
            self.heads.output_weight.requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            [p for p in self.heads.parameters() if p.requires_grad],
            lr=plan.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=plan.weight_decay,
        )
        self.step = 0

    def run_step(self) -> list[float]:
        """Train on one batch; return the loss of each head, nats."""
        plan = self.plan
        numbers = self._rows.numbers(self.step * plan.batch_rows, plan.batch_rows)
        hidden, targets = self._inputs(self._rows.rows[numbers], numbers)
        losses = []
        # One head at a time: the logits of all would take K times the memory.
        for index in range(self.heads.shape.num_heads):
            logits = self.heads.head(index, hidden).float()
            target = _shifted(targets, index)
            target = target.masked_fill(target == _UNLISTED, _IGNORED)
            loss = F.cross_entropy(logits, target, ignore_index=_IGNORED)
            torch.autograd.backward(loss)
            losses.append(loss.item())
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate * learning_rate_factor(
                self.step, plan.steps, plan.warmup_steps
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return losses

    def _inputs(self, rows: np.ndarray, numbers: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states [places, hidden_size], and for each place [rows, tokens] the output
        of the token that follows it.

        `rows` is as in `TokenRows`; `numbers` are those of rows of the training text.
        """
        batch = torch.from_numpy(rows.astype(np.int64))
        only_read = (batch < 0).to(self.backbone.device)
        batch = torch.where(batch < 0, ~batch, batch)
        if self._cache is not None and numbers is not None:
            hidden, predictions = self._cache.rows(numbers, batch)
        else:
            hidden = self.backbone.hidden_states(batch)
            predictions = self.backbone.predictions(hidden)
        # A question is not drafted for.
        not_drafted = F.pad(only_read[:, 1:], (0, 1))
        targets = self._outputs[predictions].masked_fill(not_drafted, _IGNORED)
        # Autograd refuses tensors that inference mode made.
        return hidden.flatten(0, 1).clone(), targets.clone()

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray, batch_rows: int = 8) -> list[HeadScore]:
        """Score every head on rows of held-out text, int [rows, length], against the
        model's own tokens; `nll` leaves out what the token map lacks."""
        count = self.heads.shape.num_heads
        totals = torch.zeros(count, 5, dtype=torch.float64)
        for first in range(0, len(tokens), batch_rows):
            hidden, targets = self._inputs(tokens[first : first + batch_rows])
            for index in range(count):
                logits, target = _valid(self.heads.head(index, hidden), _shifted(targets, index))
                top = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == target[:, None]
                nll = F.cross_entropy(logits, target, reduction="sum", ignore_index=_UNLISTED)
                listed = (target != _UNLISTED).sum().item()
                row = [top[:, 0].sum().item(), top.sum().item(), len(target), nll.item(), listed]
                totals[index] += torch.tensor(row, dtype=torch.float64)
        totals[:, [2, 4]] = totals[:, [2, 4]].clamp(min=1)
        return [
            HeadScore(first / num_targets, five / num_targets, nll / listed)
            for first, five, num_targets, nll, listed in totals.tolist()
        ]

    @torch.no_grad()
    def fit_temperatures(self, tokens: np.ndarray, batch_rows: int = 8) -> tuple[float, ...]:
        """Return for each head the temperature that maximizes the likelihood of held-out text.

        Source: Guo et al., "On Calibration of Modern Neural Networks" (2017), section 4.2.
        """
        grid = torch.exp(torch.linspace(math.log(0.4), math.log(2.5), 45)).tolist()
        count = self.heads.shape.num_heads
        nll = torch.zeros(count, len(grid), dtype=torch.float64)
        for first in range(0, len(tokens), batch_rows):
            hidden, targets = self._inputs(tokens[first : first + batch_rows])
            for index in range(count):
                logits, target = _valid(self.heads.head(index, hidden), _shifted(targets, index))
                for number, temperature in enumerate(grid):
                    nll[index, number] += F.cross_entropy(
                        logits / temperature, target, reduction="sum", ignore_index=_UNLISTED
                    ).item()
        return tuple(grid[number] for number in nll.argmin(dim=1).tolist())

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings only, to be read back with `weights_only=True`."""
        return {
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "settings": self._settings,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: It belongs to another plan, text, model or shape of heads.
        """
        settings, before = self._settings, state.get("settings", {})
        different = [name for name in settings if before.get(name) != settings[name]]
        if different:
            named = ", ".join(
                f"{name}={settings[name]!r} (before: {before.get(name)!r})" for name in different
            )
            raise ValueError(
                f"cannot resume with other settings: {named}; give the same --data and settings, "
                "another --out, or --no-resume to begin anew"
            )
        try:
            self.heads.load_state_dict(state["heads"])
        except RuntimeError as error:
            raise ValueError(
                "cannot resume: the heads of the interrupted run have another shape; give the same "
                "--heads and --layers, or another --out"
            ) from error
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """Return the `count` most frequent tokens of a text, int64 in ascending order.

    `tokens` is as in `TokenRows`; what heads only read is not counted.
    """
    counts = np.bincount(tokens[tokens >= 0], minlength=vocab_size)
    frequent: np.ndarray = np.argsort(-counts, kind="stable")[:count]
    return np.sort(frequent)


def _shifted(targets: Tensor, head: int) -> Tensor:
    """Return the target of a head at each place: the token that follows `head + 1` places later."""
    ahead = head + 1
    return F.pad(targets[:, ahead:], (0, ahead), value=_IGNORED).flatten()


def _valid(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target != _IGNORED
    return logits[kept].float(), target[kept]
