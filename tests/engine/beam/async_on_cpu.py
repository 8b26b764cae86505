"""Asynchronous scheduling on a CPU: vLLM switches it off there, its model runner can do it.

The runner copies results on a CUDA stream of its own; on a CPU there is nothing to wait for, so
stand-ins that do nothing take the place of streams and events.
"""

from __future__ import annotations

from typing import Any

import torch


class _Nothing:
    """A stream or an event whose work is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True


def force_async_scheduling() -> None:
    """Switch asynchronous scheduling on for engines that this process starts."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    torch.Event = torch.cuda.Event = torch.cuda.Stream = _Nothing
    torch.cuda.stream = lambda stream: _Nothing()
    torch.cuda.current_stream = lambda *args: _Nothing()
