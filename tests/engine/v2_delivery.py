"""The kernel that takes a step's drafts against its readable twin, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.delivery import Kernel
from vllm_trie.drafts.engine.runners import v2_delivery
from vllm_trie.drafts.engine.runners.v2_delivery import Delivery, packed

NUM_SLOTS, WIDTH = 7, 4


def differing_deliveries(number: int) -> list[str]:
    """Random deliveries, known or waited for, of which the kernel makes something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2_delivery, "_MOST_READS", 3)
        pairs = zip(_taken(number), _taken(number, Kernel()), strict=True)
        return [
            f"delivery {at}: {ours}, {twins}"
            for at, (ours, twins) in enumerate(pairs)
            if ours != twins
        ]


def _taken(number: int, kernel: Any = None) -> list[Any]:
    """What the device has after each delivery, with another kernel if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel is not None:
            patch.setattr(v2_delivery, "_take_drafts", kernel)
        draft_tokens = torch.zeros(NUM_SLOTS, WIDTH, dtype=torch.int64)
        delivery = Delivery(draft_tokens, may_wait=True)
        rng, taken = np.random.default_rng(0), []
        for _ in range(number):
            slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS)].tolist()
            drafts = [
                rng.integers(0, 2**31 - 1, rng.integers(0, WIDTH + 1)).tolist() for _ in slots
            ]
            _ways(delivery)[rng.integers(0, 4)](slots, drafts)
            given_up = delivery._given_up.np.tolist()
            taken.append((draft_tokens.tolist(), delivery.num_drafted.tolist(), given_up))
        assert any(any(given_up) for *_, given_up in taken)
        assert any(any(num_drafted) for _, num_drafted, _ in taken)
        return taken


def _ways(delivery: Delivery) -> list[Callable[..., None]]:
    """Drafts that are there, come in time, come in part, and come late."""

    def wait(slots: Any, drafts: Any, arrived: int = NUM_SLOTS) -> None:
        rows = packed(drafts, WIDTH)
        delivery.reserve(slots)
        if arrived:
            delivery.deliver(rows)
            delivery._rows[arrived:, 2] = 0
        delivery.launch()
        delivery.deliver(rows)

    return [
        delivery.send,
        wait,
        lambda *parts: wait(*parts, arrived=1),
        lambda *parts: wait(*parts, arrived=0),
    ]
