"""A first estimate of the duration of a step by its tokens, for the adaptive node budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.drafts.budget import NodeBudget

# Where blocks of rows end, on both sides: a step with one token more than fills its blocks can take
# a quarter longer, and one that fills larger blocks less again.
_NUM_TOKENS = (1, 8, 16, 17, 32, 33, 48, 49, 64, 65)
_MORE_TOKENS = (128, 129, 256, 257)  # for one rank, if its passes are short
_ROUNDS = 6  # of all sizes; the first one warms up
_ROUNDS_OF_RANKS = 3


@torch.inference_mode()
def calibrate_step_cost(
    budget: NodeBudget | None,
    run_step: Callable[[int], None],
    max_num_tokens: int,
    num_ranks: int,
    seconds: float = 3.0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let the budget expect the durations of forward passes; do nothing without a budget.

    Another program on the machine makes passes longer for a while. So each pass is compared with
    the other sizes' in its round, and the median over the rounds counts. The passes leave attention
    out, which real steps add, see :class:`~vllm_trie.drafts.budget.StepCost`.

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
    sizes = [n for n in _NUM_TOKENS + _MORE_TOKENS * alone if n <= max_num_tokens]
    rounds: list[list[float]] = []
    while len(rounds) < (_ROUNDS if alone else _ROUNDS_OF_RANKS):
        if alone and len(rounds) > 1 and time.perf_counter() - start > seconds:
            break
        times: list[float] = []
        for num_tokens in sizes:
            begin = clock()
            run_step(num_tokens)
            times.append(max(clock() - begin, 1e-9))
            is_long = num_tokens >= _NUM_TOKENS[-1] and times[-1] > seconds / 20
            if alone and not rounds and is_long:
                break
        sizes = sizes[: len(times)]
        rounds.append(times)
    logs = np.log(rounds[1:])
    level = logs.mean(axis=1)
    proportions = np.median(logs - level[:, None], axis=0)
    for num_tokens, took in zip(sizes, np.exp(np.median(level) + proportions), strict=True):
        budget.cost.expect(num_tokens, float(took))


def expect_measured(budget: NodeBudget | None, seconds: np.ndarray) -> None:
    """Let the budget expect durations that vLLM has measured; do nothing without a budget.

    Args:
        budget: changed.
        seconds: float64, by number of tokens.
    """
    num_tokens = 1
    while budget is not None and num_tokens + 1 < len(seconds):
        for size in (num_tokens, num_tokens + 1):  # a CUDA graph's size, and one beyond
            budget.cost.expect(size, float(seconds[size]))
        num_tokens *= 2
