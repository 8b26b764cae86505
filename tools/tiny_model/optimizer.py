"""Muon for the matrices, AdamW for embeddings and norms.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
by its nearest orthogonal matrix, found by a few Newton-Schulz steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.tiny_model.model import TinyLlama

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Push the singular values of ``[count, rows, columns]`` towards 1 (within about 30 %).

    Rows must not exceed columns. Computed in bfloat16, returned as float32.
    """
    a, b, c = _QUINTIC
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.bfloat16()
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.float()


class MuonAdamW:
    """Both optimizers behind one ``step``.

    Args:
        model: its parameters are updated in place.
        matrix_lr, other_lr: peak learning rates of Muon and of AdamW.
        weight_decay: of the matrices, relative to their learning rate.
    """

    def __init__(
        self,
        model: TinyLlama,
        matrix_lr: float = 0.02,
        other_lr: float = 0.01,
        weight_decay: float = 0.05,
    ) -> None:
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self._matrix_lr, self._other_lr, self._decay = matrix_lr, other_lr, weight_decay
        self._adam = torch.optim.AdamW(
            others, lr=other_lr, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=True
        )
        # Matrices of one shape are stacked, so that each Newton-Schulz step is one batched call.
        self._groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in matrices:
            self._groups.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
        self._momentum = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, scale: float, momentum: float = 0.95) -> None:
        """One update with both learning rates times ``scale``; clears the gradients."""
        rate = self._matrix_lr * scale
        for shape, group in self._groups.items():
            wide = [tuple(p.shape) == shape for p in group]
            gradient = torch.stack(
                [p.grad if is_wide else p.grad.T for p, is_wide in zip(group, wide, strict=True)]
            )
            average = self._momentum[shape].lerp_(gradient, 1 - momentum)
            updates = orthogonalize(gradient.lerp(average, momentum))  # Nesterov
            for parameter, update, is_wide in zip(group, updates, wide, strict=True):
                gain = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - rate * self._decay)
                parameter.add_(update if is_wide else update.T, alpha=-rate * gain)
                parameter.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._other_lr * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {"adam": self._adam.state_dict(), "momentum": list(self._momentum.values())}

    def load_state_dict(self, state: dict) -> None:
        self._adam.load_state_dict(state["adam"])
        for mine, theirs in zip(self._momentum.values(), state["momentum"], strict=True):
            mine.copy_(theirs)
