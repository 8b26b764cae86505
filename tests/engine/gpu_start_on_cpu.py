"""The start of a GPU's worker on a CPU: profiling, warm-up, the capture of CUDA graphs.

Import :mod:`tests.engine.v2_on_cpu` first, and :func:`start_as_on_a_gpu` before engines start.
Attention is the GPU's Triton kernels in the interpreter, which read a step's tensors where a graph
was captured with them. A stand-in for a graph runs the captured forward pass again, on its static
buffers and metadata.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker as stock_cpu_worker
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.workspace import init_workspace_manager

from tests.engine.gpu_device_check import CHECKED
from vllm_trie.attention import gpu_launch
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.runners import v2_trees
from vllm_trie.drafts.engine.workers import cpu_worker
from vllm_trie.drafts.engine.workers.cuda_worker import GPU_BACKEND_CLASS
from vllm_trie.extras.device_checks import start_check
from vllm_trie.extras.device_checks.gpu_check import DeviceCheck, check_device

STOCK_BACKEND_CLASS = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
CAPTURE_SIZES = [4, 8]
device_checks: list[DeviceCheck] = []
"""Results of the check of tree attention."""


class Graph:
    """A stand-in for a CUDA graph."""

    replays = 0
    forward: Callable[[CUDAGraphMode], None]
    """Of the graph that is captured."""

    def __init__(self) -> None:
        self._forward = Graph.forward

    def replay(self) -> None:
        Graph.replays += 1
        for scratch in _scratch:
            scratch.fill_(torch.nan)  # a replay may not read it before it writes
        self._forward(CUDAGraphMode.NONE)


_scratch: list[torch.Tensor] = []
"""The memory of tree attention's partial results."""


def _keep_scratch() -> None:
    stock = gpu_launch.TreeBuffers.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _scratch.extend((self.partial, self.state))

    gpu_launch.TreeBuffers.__init__ = init


def _follow_captures() -> None:
    stock = cudagraph_utils.CudaGraphManager.capture

    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        def create(desc: Any, warmup: bool) -> Any:
            Graph.forward = staticmethod(create_forward_fn(desc, warmup))
            return Graph.forward

        stock(self, create, *args, **kwargs)

    cudagraph_utils.CudaGraphManager.capture = capture


def start_as_on_a_gpu() -> None:
    """Let engines start as on a GPU whose attention is vLLM's Triton backend."""
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    for name in ("graph_capture", "capture_pool", "capture_outside_cumem_pool"):
        setattr(cudagraph_utils, name, lambda *args, **kwargs: contextlib.nullcontext())
    CpuPlatform._global_graph_pool = None
    CpuPlatform.graph_pool_handle = classmethod(lambda cls: object())
    CpuPlatform.get_global_graph_pool = classmethod(lambda cls: object())
    triton_attn.NUM_PAR_SOFTMAX_SEGMENTS = 2  # instead of 16, each of which is a program
    gpu_worker.kernel_warmup = lambda worker: None  # kernels of devices and models
    adaptive_verification._PROFILE_REPLAYS = 1
    start_check._slowdown = lambda *runs: None  # the interpreter's times say nothing
    start_check.NUM_TOKENS, start_check._LONG_PROMPT = 6, 40
    _follow_captures()
    _keep_scratch()
    config.CPU_WORKER_CLASS = f"{__name__}.DraftingStart"
    cpu_worker.choose_attention = _choose_attention
    v2_trees.V2TreeAdapter._takes_chains = False
    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        compilation.cudagraph_capture_sizes = CAPTURE_SIZES
        compilation.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
        vllm_config.kernel_config.enable_jit_warmup = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _choose_attention(for_trees: bool) -> None:
    path = GPU_BACKEND_CLASS if for_trees else STOCK_BACKEND_CLASS
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    selector._cached_get_attn_backend.cache_clear()


class _Start(stock_cpu_worker.CPUWorker):
    """vLLM's part of the start as on a GPU."""

    def init_device(self) -> None:
        super().init_device()
        init_workspace_manager(self.device)

    def _maybe_activate_jit_monitor(self) -> None:
        """Leave out what would watch Triton's compiler, which does not run."""

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        self.model_runner.profile_cudagraph_memory()
        return self.cache_config.kv_cache_memory_bytes

    def compile_or_warm_up_model(self) -> Any:
        return gpu_worker.Worker.compile_or_warm_up_model(self)


class DraftingStart(cpu_worker.TreeCPUWorker, _Start):
    """A worker on a CPU that starts as on a GPU, with the check of its attention."""

    checks_start = True

    def compile_or_warm_up_model(self) -> Any:
        if config.verification(self.vllm_config) == "tree":
            device_checks.append(check_device(self.model_runner, CHECKED, splits=(1, 2)))
        return super().compile_or_warm_up_model()
