"""A custom logits processor of Model Runner V1 that depends on a request's output."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class Apart(LogitsProcessor):
    """Forbids the last token and the ids behind it: ``extra_args["apart"]``, and up to four more.

    The last token and the number of tokens are taken in ``update_state``.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[int, list[int]]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._added)
        self._ranges = {
            index: (output[-1], apart + len(output) % 5)
            for index, (apart, output) in self._requests.items()
            if output
        }

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (last, apart) in self._ranges.items():
            logits[index, last : last + apart] = -torch.inf
        return logits

    @staticmethod
    def _added(params: Any, prompt: Any, output: list[int]) -> tuple[int, list[int]] | None:
        apart = (params.extra_args or {}).get("apart")
        return None if apart is None else (apart, output)
