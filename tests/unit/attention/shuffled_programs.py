"""Triton's interpreter with the programs of a launch in a random order, as a GPU may run them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def shuffle_programs(seed: int = 0) -> None:
    """Have each launch from here on run its programs in another order, in this process."""
    from triton.runtime.interpreter import interpreter_builder as builder

    _patch_language_once()
    rng = np.random.default_rng(seed)
    orders: list[list[int]] = []
    size_grid, choose_program = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(*sizes: int) -> None:
        orders[:] = [rng.permutation(size).tolist() for size in sizes]
        size_grid(*sizes)

    def set_grid_idx(*places: int) -> None:
        choose_program(*(order[place] for order, place in zip(orders, places, strict=True)))

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx


def _patch_language_once() -> None:
    """Leave the interpreter's operations in the language, which each launch and each call of a
    function would put there and launches take out again: most of the interpreter's time."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang

    @functools.cache
    def patch(function: Any) -> Any:
        stock(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch
