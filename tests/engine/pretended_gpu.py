"""Configures engines on a machine that pretends to have an H100: what is on, off and touched.

A program of its own: vLLM decides once per process what its platform is. Its CUDA platform is the
real one, with answers in place of the driver's; compiled extensions are stood in for. Nothing runs
on it. Prints one JSON object.
"""

# What is set up here must stand before the imports that it is for.
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
)
sys.modules |= {name: MagicMock() for name in EXTENSIONS}

import torch
import triton
import triton.language
import triton.language.extra.libdevice
import vllm.platforms
import vllm.triton_utils
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class PretendedCuda(CudaPlatformBase):
    """vLLM's CUDA platform, with the driver's answers made up."""

    capability = DeviceCapability(9, 0)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "pretended"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def import_kernels(cls) -> None:
        pass


vllm.platforms._current_platform = PretendedCuda()
vllm.triton_utils.HAS_TRITON = vllm.triton_utils.importing.HAS_TRITON = True
vllm.triton_utils.triton = triton
vllm.triton_utils.tl = triton.language
vllm.triton_utils.tldevice = triton.language.extra.libdevice

cuda_starts: list[str] = []


def start_cuda() -> None:
    cuda_starts.append("started")
    raise RuntimeError("there is no device")


torch.cuda._lazy_init = start_cuda

import vllm._custom_ops

for name in dir(vllm._custom_ops):
    if "support" in name:  # asks a compiled extension
        setattr(vllm._custom_ops, name, lambda *arguments: False)

stock_torch = (torch.Tensor.pin_memory, torch.cuda.Event, torch.cuda.current_stream)

from vllm_trie.hooks import plugin

plugin.register()

from vllm import SamplingParams, envs
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import cudagraph_utils

from tests.engine.families import FAMILIES, write_config
from tests.processes import note_lines
from vllm_trie.drafts.engine.config import verification
from vllm_trie.drafts.engine.runners import v2
from vllm_trie.drafts.engine.workers.cuda_worker import GPU_BACKEND_CLASS
from vllm_trie.hooks.start import limits
from vllm_trie.lab.tiny_model import model_path

cudagraph_utils.get_pp_group = MagicMock()
PretendedCuda.get_global_graph_pool = classmethod(lambda cls: (0, 0))
TREES, CHAINS = {"verification": "tree"}, {"verification": "chain"}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
_folder = tempfile.TemporaryDirectory()
MLA = {
    "model": write_config(Path(_folder.name), FAMILIES["DeepSeek V2"].config),
    "max_model_len": 256,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one length": {"capability": DeviceCapability(8, 0), "max_num_seqs": 100},
    "FlashInfer": {"attention_backend": "FLASHINFER"},
    "FlashInfer by configuration": {"attention_config": {"backend": "FLASHINFER"}},
    "FlashAttention": {"attention_backend": "flash_attn"},
    "Triton": {"capability": DeviceCapability(8, 0), "attention_backend": "triton_attn"},
    "no graphs": {"capability": DeviceCapability(8, 0), "enforce_eager": True},
    "MLA": MLA,
    "MLA without graphs": {**MLA, "compilation_config": {"cudagraph_mode": "NONE"}},
    "any length by Triton": {
        "capability": DeviceCapability(8, 0),
        "attention_backend": "TRITON_ATTN",
    },
    "trees": {"speculation": TREES},
    "V1": {"runner_v2": False},
    "TRITON_ATTN": {"attention_backend": "TRITON_ATTN", "speculation": TREES},
    "FLASH_ATTN": {"attention_backend": "FLASH_ATTN", "speculation": TREES},
    "FULL": {"compilation_config": {"cudagraph_mode": "FULL"}, "speculation": TREES},
    "fp8": {"kv_cache_dtype": "fp8", "speculation": TREES},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2", "speculation": TREES},
    "another dtype": {"kv_cache_dtype": "float16", "speculation": TREES},
    "chains, synchronous": {"speculation": CHAINS, "async_scheduling": False},
    "sharded sampling": {"enable_batch_sharded_sampling": True, **RANKS},
    "trace replay": {"enable_trace_replay": True, "speculation": TREES},
    "attention in chunks": {"hf_overrides": {"attention_chunk_size": 128}},
    "KV connector": {"kv_offloading_size": 1.0},
    "pipeline stages": STAGES,
    "trees in stages": {**STAGES, "speculation": TREES},
    "synchronous stages": {**STAGES, "async_scheduling": False},
}
SHAPE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
SPECS: dict[str, list[Any]] = {
    "full": [FullAttentionSpec(**SHAPE)],
    "mla": [MLAAttentionSpec(**SHAPE)],
    "compressed": [MLAAttentionSpec(**SHAPE, tokens_per_state=4)],
    "window": [FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=32)],
}
lines: list[str] = []


def configure(
    speculation: dict[str, Any] | None = None,
    runner_v2: bool | None = None,
    capability: DeviceCapability = PretendedCuda.capability,
    **settings: Any,
) -> Any:
    PretendedCuda.capability = capability
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = runner_v2
    speculation = {"method": "ngram_trie", **(speculation or {})}
    settings = {"model": str(model_path()), "max_model_len": 512, **settings}
    return EngineArgs(speculative_config=speculation, **settings).create_engine_config()


def described(**settings: Any) -> dict[str, Any]:
    try:
        config = configure(**settings)
    except ValueError as error:
        return {"refused": str(error)}
    return {
        "worker": config.parallel_config.worker_cls,
        "verification": verification(config),
        "tokens": config.speculative_config.num_speculative_tokens,
        "tiers": config.speculative_config.num_speculative_tokens_per_batch_size,
        "v2": bool(config.use_v2_model_runner),
        "async": bool(config.scheduler_config.async_scheduling),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "ahead": v2._launches_ahead(config),
    }


def chosen_backend() -> dict[str, Any]:
    """What vLLM makes of the backend in the worker."""
    config = configure(TREES)
    register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND_CLASS)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    with set_current_vllm_config(config):
        backend = get_attn_backend(64, torch.bfloat16, "auto")
        graphs = {mode: dispatched(mode, backend) for mode in ("FULL_AND_PIECEWISE", "FULL")}
        try:
            get_attn_backend(64, torch.bfloat16, "auto", use_mm_prefix=True)
            prefix = ""
        except ValueError as error:
            prefix = str(error)
    return {"backend": backend.__name__, "graphs": graphs, "mm_prefix": prefix}


def dispatched(asked: str, backend: Any) -> list[str]:
    """The mode, and the kinds of graphs of a step of full drafts and of one of other lengths."""
    config = configure(compilation_config={"cudagraph_mode": asked})
    length = 1 + config.num_speculative_tokens
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        backend.get_builder_cls().get_cudagraph_support(config, None),
        backend.__name__,
        length,
        use_v2_model_runner=True,
    )
    manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, length)
    manager._graphs_captured = True
    kinds = [
        manager.dispatch(2, 2 * length, length, 0).cg_mode,
        manager.dispatch(2, 2 * length - 3, None, 0).cg_mode,
    ]
    return [mode.name, *(kind.name for kind in kinds)]


def speculation() -> dict[str, Any]:
    """What the plugin does to the configurations of engines with draft trees."""
    return {
        "status": plugin.status(),
        "lines": lines_of(configure),
        "settings": {name: described(**values) for name, values in SETTINGS.items()},
        "chosen": chosen_backend(),
    }


def scheduled(num_running: int, speculation: dict[str, Any] | None) -> dict[str, int]:
    """What vLLM's scheduler makes of a step in which 8 prompts wait behind running requests."""
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = None
    config = EngineArgs(
        model=str(model_path()),
        max_model_len=512,
        max_num_seqs=1088,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        speculative_config=speculation,
    ).create_engine_config()
    made = scheduler(config, SPECS["full"], num_blocks=40_000)

    def add(name: str, length: int) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        made.add_request(Request(name, [1] * length, params, None))

    for number in range(num_running):
        add(f"running {number}", 4)
    outputs = deque([made.schedule()])
    for _ in range(6):  # two steps are on the device
        outputs.append(made.schedule())
        of_step = outputs.popleft()
        names = [*of_step.num_scheduled_tokens]
        made.update_from_output(
            of_step,
            ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, [[1] for _ in names]),
        )
    for number in range(8):
        add(f"prompt {number}", 500)
    step = made.schedule()
    prefills = [n for name, n in step.num_scheduled_tokens.items() if name.startswith("prompt")]
    return {
        "running": len(step.num_scheduled_tokens) - len(prefills),
        "prefill tokens": sum(prefills),
        "placeholders": sum(map(len, step.scheduled_spec_decode_tokens.values())),
    }


def loads() -> dict[str, list[dict[str, int]]]:
    """The same without the plugin and with it, by running requests."""
    methods = None, {"method": "ngram_trie"}
    sizes = 64, 128, 256, 512, 1024
    return {str(size): [scheduled(size, method) for method in methods] for size in sizes}


def configured_for_beams(options: dict[str, Any] | None, **settings: Any) -> Any:
    additional = {} if options is None else {"additional_config": {"vllm_trie": options}}
    return EngineArgs(
        model=str(model_path()), max_model_len=512, **additional, **settings
    ).create_engine_config()


def scheduler(config: Any, specs: list[Any], num_blocks: int = 32) -> Any:
    """As vLLM's engine core makes it."""
    init_none_hash(sha256)
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


def described_beams(options: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    config = configured_for_beams(options, **settings)
    lines.clear()
    made = scheduler(config, SPECS["full"])
    return {
        "reason": limits.reason_off(config),
        "scheduler": made.beam_off,
        "asynchronous": isinstance(made, AsyncScheduler),
        "v2": made.use_v2_model_runner,
        "lines": [line for line in lines if "beam search" in line],
    }


def lines_of(call: Callable[[], object]) -> list[str]:
    """What the plugin logs meanwhile."""
    lines.clear()
    call()
    return [*lines]


def beams() -> dict[str, Any]:
    """What the plugin does to beam search."""
    result: dict[str, Any] = {
        "default": described_beams(None),
        "off": described_beams({"beam_search": False}),
        "with_chains": described_beams(None, speculative_config={"method": "ngram_trie"}),
    }
    config = configured_for_beams(None)
    result["caches"] = {
        name: scheduler(copy(config), specs).beam_off for name, specs in SPECS.items()
    }
    stock = PretendedCuda.is_cuda
    PretendedCuda.is_cuda = classmethod(lambda cls: False)
    other = SimpleNamespace(
        additional_config=None, scheduler_config=SimpleNamespace(scheduler_cls=None)
    )
    result["other"] = limits.reason_off(other)
    PretendedCuda.is_cuda = stock
    return result


def touched() -> dict[str, Any]:
    """What is left of all that: starts of CUDA, and what of the CPU's took a place in torch."""
    torchs = (torch.Tensor.pin_memory, torch.cuda.Event, torch.cuda.current_stream)
    return {
        "cuda_starts": len(cuda_starts),
        "torch_as_it_was": stock_torch == torchs,
        "cpu_modules": [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")],
    }


def main() -> None:
    note_lines("vllm.vllm_trie", lines)
    result = {"beams": beams(), "speculation": speculation(), "loads": loads(), **touched()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
