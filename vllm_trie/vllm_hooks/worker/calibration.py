"""A first idea of what the tokens of a step cost, for the adaptive node budget."""

from __future__ import annotations

import time
from typing import Any

import torch

_NUM_TOKENS = (1, 2, 5, 9, 17, 33, 65)
_MORE_TOKENS = (129, 257)  # where they take no time to speak of
_REPEATS = 3
_REPEATS_OF_RANKS = 2


@torch.inference_mode()
def calibrate_step_cost(runner: Any, seconds: float = 2.0) -> None:
    """Let the budget observe forward passes on no request; nothing to do for a fixed budget.

    Attention is left out; what the steps really take is learned as they come.

    Args:
        runner: a runner with the mixin, ready to run; its budget is changed.
        seconds: about the longest time to spend. Several ranks do the same number of passes
            instead: their clocks differ, and a rank that stopped alone would leave the others
            waiting for it.
    """
    budget = runner.drafter.node_budget
    if budget is None:
        return
    alone = runner.parallel_config.world_size_across_dp == 1
    start = time.perf_counter()
    sizes = [n for n in _NUM_TOKENS if n <= runner.max_num_tokens]
    if alone:
        sizes += [n for n in _MORE_TOKENS if n <= runner.max_num_tokens]
    for repeat in range(_REPEATS if alone else _REPEATS_OF_RANKS):
        for num_tokens in sizes:
            begin = time.perf_counter()
            hidden_states, _ = runner._dummy_run(num_tokens)
            runner.model.compute_logits(hidden_states[:num_tokens])
            runner._sync_device()  # a GPU has only been told what to do so far
            took = time.perf_counter() - begin
            if repeat:  # the first one warms up
                budget.expect_step(num_tokens, took)
            elif alone and num_tokens >= _NUM_TOKENS[-1] and took > seconds / 20:
                sizes = sizes[: sizes.index(num_tokens) + 1]
                break
        if alone and repeat and time.perf_counter() - start > seconds:
            return
