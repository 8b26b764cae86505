"""A first estimate of the duration of a step by its tokens, for the adaptive node budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.drafts.budget import NodeBudget

# On both sides of a power of two: matrix products work on blocks of rows, and a step with one token
# more than fills its blocks can take a quarter longer.
_NUM_TOKENS = (1, 8, 16, 17, 32, 33, 64, 65)
_MORE_TOKENS = (128, 129, 256, 257)  # for one rank, if its passes are short
_REPEATS = 3
_REPEATS_OF_RANKS = 2


@torch.inference_mode()
def calibrate_step_cost(
    budget: NodeBudget | None,
    run_step: Callable[[int], None],
    max_num_tokens: int,
    num_ranks: int,
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let the budget expect the durations of forward passes; do nothing without a budget.

    Of several passes of a size the shortest counts: the first one warms up, and another program on
    the machine makes passes longer, never shorter. The passes leave attention out, which real steps
    add, see :class:`~vllm_trie.drafts.budget.StepCost`.

    Args:
        budget: changed.
        run_step: Runs a forward pass of a number of tokens and waits for its end.
        max_num_tokens: Most tokens of a step.
        num_ranks: Ranks that run together. Several do the same number of passes whatever their
            clocks say: a rank that stopped alone would leave the others waiting for it.
        seconds: About the longest time to spend, for one rank.
        clock: Times the passes. Where the calling thread computes, its processor time does not
            depend on other programs.
    """
    if budget is None:
        return
    alone = num_ranks == 1
    start = time.perf_counter()
    shortest: dict[int, float] = {}
    sizes = [n for n in _NUM_TOKENS + _MORE_TOKENS * alone if n <= max_num_tokens]
    for repeat in range(_REPEATS if alone else _REPEATS_OF_RANKS):
        for num_tokens in sizes:
            begin = clock()
            run_step(num_tokens)
            took = clock() - begin
            shortest[num_tokens] = min(took, shortest.get(num_tokens, took))
            is_long = num_tokens >= _NUM_TOKENS[-1] and took > seconds / 20
            if alone and not repeat and is_long:
                sizes = sizes[: sizes.index(num_tokens) + 1]
                break
        if alone and repeat and time.perf_counter() - start > seconds:
            break
    for num_tokens, took in shortest.items():
        budget.expect_step(num_tokens, took)


def expect_measured(budget: NodeBudget | None, seconds: np.ndarray) -> None:
    """Let the budget expect durations that vLLM has measured; do nothing without a budget.

    Args:
        budget: changed.
        seconds: float64, by number of tokens.
    """
    num_tokens = 1
    while budget is not None and num_tokens + 1 < len(seconds):
        for size in (num_tokens, num_tokens + 1):  # a CUDA graph's size, and one beyond
            budget.expect_step(size, float(seconds[size]))
        num_tokens *= 2
