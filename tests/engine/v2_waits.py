"""Counts how often a step of Model Runner V2 waits for a device, on a CPU where nothing does.

Everything lies on the CPU there. What would lie on the host beside a GPU too is known by where it
comes from: NumPy arrays, copies to ``"cpu"``, tensors made with ``device="cpu"``; vLLM's runner and
the plugin name the model's device by an object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from tests.engine import v2_on_cpu
from vllm_trie.lab.local_engine import runner_of

_READS = frozenset(
    ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "equal", "allclose")
    + ("__bool__", "__int__", "__float__", "__index__")
)


_WATCHED = _READS | {"__getitem__", "__setitem__", "copy_", "to"}

_from_numpy = torch.from_numpy


def _tensor_on_host(array: Any) -> torch.Tensor:
    tensor = _from_numpy(array)
    tensor._on_host = True
    return tensor


torch.from_numpy = _tensor_on_host  # no mode sees its calls


class HostReads(TorchFunctionMode):
    """Counts the calls that would wait for a device: reads of its tensors, blocking copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in _WATCHED and not isinstance(result, torch.Tensor):
            return result
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        on_host = bool(tensors) and _is_on_host(tensors[0])
        if name in _READS:
            self.count += bool(tensors) and not on_host
        elif name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            read = [i for i in index if isinstance(i, torch.Tensor) and not i.dim()]  # as a number
            if name == "__getitem__":
                read += [i for i in index if getattr(i, "dtype", None) == torch.bool]
            self.count += bool(read) and not on_host
        elif name == "copy_":
            self.count += on_host != _is_on_host(tensors[-1]) and not kwargs.get("non_blocking")
        elif name == "to" and (target := _device_in((*args[1:], kwargs.get("device")))):
            self.count += on_host != _names_host(target) and not kwargs.get("non_blocking")
            on_host = _names_host(target)
            result = result.detach() if result is tensors[0] else result  # here it is no copy
        if isinstance(result, torch.Tensor):
            result._on_host = on_host or _names_host(kwargs.get("device"))
        return result


def _device_in(arguments: Any) -> Any:
    return next((value for value in arguments if isinstance(value, str | torch.device)), None)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_on_host", False)


def _names_host(device: Any) -> bool:
    return isinstance(device, str) and device == "cpu"


class Waits:
    """Waits of an engine's steps, from now on.

    Attributes:
        of_steps: for each step, in the worker before the next step can be launched.
        of_outputs: for each output, where the engine fetches it; vLLM's own.
    """

    def __init__(self, llm: Any) -> None:
        runner = runner_of(llm)
        self.of_steps: list[int] = []
        self.of_outputs: list[int] = []
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            waits, output = _counted(execute, *args, **kwargs)
            self._started = waits
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            waits, output = _counted(sample, *args, **kwargs)
            if isinstance(output, AsyncOutput):
                self.of_steps.append(self._started + waits)
                output.get_output = self._fetched(output.get_output)
            return output

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def _fetched(self, get_output: Any) -> Any:
        def fetch() -> Any:
            waits, output = _counted(get_output)
            self.of_outputs.append(waits)
            return output

        return fetch

    def summary(self) -> dict[str, list[int]]:
        """Least and most waits of a step and of an output, and how many there were."""
        waits = {"step": self.of_steps, "output": self.of_outputs}
        return {name: [min(counts), max(counts), len(counts)] for name, counts in waits.items()}


def _counted(call: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Return how often a call waits, and its result."""
    before = v2_on_cpu.Event.waits.count
    with HostReads() as reads:
        result = call(*args, **kwargs)
    return v2_on_cpu.Event.waits.count - before + reads.count, result
