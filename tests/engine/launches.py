"""What Triton would compile for a GPU: the launches of its interpreter, by specialization.

A GPU compiles a kernel anew for another type of an argument, another constant, and for numbers and
addresses that 16 divides or not. A launch with a new specialization makes a request wait.
:mod:`tests.engine.gpu_compile_run` compiles what was launched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

Launch = tuple[str, str]
"""A kernel's name and its specialization: as JSON, the type of each argument with the constant or
what is true of the number, and the options."""
launches: set[Launch] = set()
"""Of this process, since :func:`record_launches`."""


class _OnDevice:
    """A tensor at its place in an allocation, which a device aligns and the host need not."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


@functools.cache
def _binder(kernel: InterpretedFunction) -> Callable[..., Any]:
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, CUDABackend)


def record_launches() -> None:
    """Add each launch from here on to :data:`launches`."""
    stock = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        on_device = [_OnDevice(arg) if torch.is_tensor(arg) else arg for arg in args]
        named = {k: _OnDevice(v) if torch.is_tensor(v) else v for k, v in kwargs.items()}
        arguments, specialization, options = _binder(self)(*on_device, **named)
        pairs = dict(zip(arguments, specialization, strict=True))
        text = json.dumps([pairs, options], default=lambda constant: {"tl": str(constant)})
        launches.add((f"{self.fn.__module__}.{self.fn.__name__}", text))
        return stock(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run


def new_launches(before: set[Launch], module: str = "") -> list[Launch]:
    """Return the launches of kernels in a module, or below it, that were not there before."""
    return sorted(launch for launch in launches - before if launch[0].startswith(module))
