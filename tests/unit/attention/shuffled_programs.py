"""Triton's interpreter with the programs of a launch in a random order, as a GPU may run them."""

from __future__ import annotations

import numpy as np

from tests.unit.attention.quick_interpreter import replay_operations


def shuffle_programs(seed: int = 0) -> None:
    """Have each launch from here on run its programs in another order, in this process."""
    from triton.runtime.interpreter import interpreter_builder as builder

    replay_operations()
    rng = np.random.default_rng(seed)
    orders: list[list[int]] = []
    size_grid, choose_program = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(*sizes: int) -> None:
        orders[:] = [rng.permutation(size).tolist() for size in sizes]
        size_grid(*sizes)

    def set_grid_idx(*places: int) -> None:
        choose_program(*(order[place] for order, place in zip(orders, places, strict=True)))

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
