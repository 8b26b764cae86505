"""Speculation and beam search where vLLM's platform is CUDA: what is on, off and touched.

A program of its own, see :mod:`tests.engine.pretended_cuda_run`, whose platform it takes. Prints
one JSON object.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

from tests.engine import pretended_cuda_run as pretended  # first: it makes the platform

# isort: split

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_trie.tiny_model import model_path
from vllm_trie.vllm_hooks.setup import beam_support

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


def configured(options: dict[str, Any] | None, **settings: Any) -> Any:
    additional = {} if options is None else {"additional_config": {"vllm_trie": options}}
    return EngineArgs(
        model=str(model_path()), max_model_len=512, **additional, **settings
    ).create_engine_config()


def scheduler(config: Any, specs: list[Any]) -> Any:
    """As vLLM's engine core makes it."""
    init_none_hash(sha256)
    config.cache_config.num_gpu_blocks = 32
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(32, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


def described(options: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    try:
        config = configured(options, **settings)
    except ValueError as error:
        return {"refused": str(error)}
    lines.clear()
    made = scheduler(config, SPECS["full"])
    return {
        "reason": beam_support.reason_off(config),
        "scheduler": made.beam_off,
        "asynchronous": isinstance(made, AsyncScheduler),
        "v2": made.use_v2_model_runner,
        "lines": [line for line in lines if "beam search" in line],
    }


def beams() -> dict[str, Any]:
    """What the plugin does to beam search."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm_trie").addHandler(handler)
    result: dict[str, Any] = {
        "default": described(None),
        "allowed": described({"allow_untested_gpu": True}),
        "off": described({"allow_untested_gpu": True, "beam_search": False}),
        "yes": described({"allow_untested_gpu": "yes"}),
        "with_trees": described(
            None, speculative_config={"method": "ngram_trie", "allow_untested_gpu": True}
        ),
    }
    allowed = configured({"allow_untested_gpu": True})
    result["caches"] = {name: scheduler(allowed, specs).beam_off for name, specs in SPECS.items()}
    stock = pretended.PretendedCuda.is_cuda
    pretended.PretendedCuda.is_cuda = classmethod(lambda cls: False)
    config = SimpleNamespace(additional_config={"vllm_trie": {"allow_untested_gpu": True}})
    config.scheduler_config = SimpleNamespace(scheduler_cls=None)
    result["other"] = beam_support.reason_off(config)
    pretended.PretendedCuda.is_cuda = stock
    return result


def main() -> None:
    result = {"beams": beams(), "speculation": pretended.speculation(), **pretended.touched()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
