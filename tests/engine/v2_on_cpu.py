"""Model Runner V2 on a CPU: its kernels in Triton's interpreter, its streams and events idle.

vLLM's CPU build has the runner and a worker for it, and misses a Triton that runs on CPUs. Import
this module before vLLM, in a process of its own: Triton reads its environment once, and vLLM
decides once whether it has Triton. Everything else is vLLM's own: the runner, its kernels, its
rejection sampler, its scheduler; attention is the CPU's.
"""

# What is set up here must stand before the imports that it is for.
# ruff: noqa: E402

from __future__ import annotations

import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # its own Triton code would want a device
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import triton.backends

# vLLM's CPU build takes Triton only with a backend for CPUs; the interpreter needs none.
triton.backends.backends["cpu"] = SimpleNamespace(
    driver=SimpleNamespace(is_active=lambda: True), compiler=None
)

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.unit.attention.shuffled_programs import shuffle_programs

shuffle_programs()

# vLLM calls it eight times when an engine starts: up to 3 s. The programs keep their engines.
gc.collect = lambda generation=2: 0
kept: list[Any] = []


_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def _as_bool(mask: TensorHandle) -> TensorHandle:
    """A mask that the interpreter takes; a conjunction with a scalar may come as integers."""
    return TensorHandle(mask.data.astype(bool), mask.dtype)


InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: _load(
    self, ptrs, _as_bool(mask), *rest
)
InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: _store(
    self, ptrs, value, _as_bool(mask), *rest
)


class _Waits(threading.local):
    count = 0


class Event:
    """A stand-in for an event, whose work is always done; counts the waits of each thread."""

    waits = _Waits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._was_asked = False

    def record(self, *args: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        Event.waits.count += 1

    def query(self) -> bool:
        """Say no at first, as an event of the step that runs does."""
        was_asked, self._was_asked = self._was_asked, True
        return was_asked


def schedule_as_on_a_gpu() -> None:
    """Leave asynchronous scheduling as vLLM resolved it, which a CPU always switches off."""
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401 - its stand-ins, for streams too; here for events
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        resolved = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = resolved

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    registry._run_in_subprocess = lambda function: function()  # which imports vLLM anew
    # This kernel is beyond the interpreter; vLLM has its twin in torch operations. vLLM 0.33 gives
    # the kernel hints too.
    twin = topk_topp_sampler.apply_top_k_top_p_pytorch
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **hints: twin(logits, k, p)
    torch.Event = torch.cuda.Event = Event


def use_v2(value: bool) -> None:
    """Choose the model runner of the engines that start from now on."""
    from vllm import envs

    # Where an engine has run, vLLM reads no environment variable any more.
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = value


def start(**options: Any) -> Any:
    """Start an engine with these options over those of all programs, and keep it: one that is freed
    ends the process groups of the others."""
    from vllm import LLM

    from vllm_trie.lab.tiny_model import model_path

    settings = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 160,
        "max_num_batched_tokens": 48,
        "disable_log_stats": False,
        "seed": 0,
        **options,
    }
    kept.append(LLM(**settings))
    return kept[-1]
