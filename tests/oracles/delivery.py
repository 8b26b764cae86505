"""The readable twin of the kernel that takes a step's drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def take_drafts(
    staged: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_drafted: torch.Tensor,
    given_up: torch.Tensor,
    number: int,
    width: int,
) -> None:
    """Write each row's draft, without waiting for what is missing of it."""
    for slot, *row in staged.tolist():
        is_complete = all(value >> 32 == number for value in row)
        values = [value % 2**32 for value in row]
        num_drafted[slot] = values[0] if is_complete else 0
        draft_tokens[slot] = torch.tensor(values[1 : 1 + width])
        if not is_complete:
            given_up[number % 2] = number


class Kernel:
    """The twin, launched as the kernel is."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(staged: torch.Tensor, *rest: Any, **options: Any) -> None:
            take_drafts(staged[: grid[0]], *rest)

        return launch
