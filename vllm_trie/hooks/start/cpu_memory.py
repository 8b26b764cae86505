"""Memory of CPU engines: how much of it an engine takes, and the size of a KV block.

vLLM would reserve 92 % of the memory, and does not start where less is free. The worker checks that
after the processes have started, so what is free here is not a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.start.limits import reason_off

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(f"vllm.{__name__}")

_SHARE_OF_FREE = 0.5
"""Share of the free memory for the weights and the KV cache, which takes what they leave."""
_STOCK_BLOCK, _BEAM_BLOCK = 128, 32
"""Tokens of a KV block: vLLM's default on CPUs, and the least that its CPU attention takes."""


def shrink_blocks(vllm_config: VllmConfig, asked: int | None) -> None:
    """Give an engine that serves beam searches the smallest KV blocks.

    Beams share full blocks, and each has a last one of its own. Leaves alone what the user or the
    model's attention has set, and what goes with it.

    Args:
        vllm_config: Complete; its block size is changed in place.
        asked: The engine arguments' ``block_size``.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if (
        current_platform.is_cpu()
        and asked is None
        and cache.block_size == _STOCK_BLOCK
        and cache.num_gpu_blocks_override is None  # counts blocks of the size that is asked for
        and cache.prefix_match_unit is None  # must divide it
        and not vllm_config.model_config.is_hybrid
        and reason_off(vllm_config) is None
    ):
        cache.block_size = _BEAM_BLOCK
        cache.user_specified_block_size = True  # or a copy of the configuration has the default


def reserve_what_is_free(vllm_config: VllmConfig, asked: float) -> None:
    """Lower the share of memory that an engine reserves to half of what is free, and say so.

    Leaves alone what the user has set.

    Args:
        vllm_config: Complete; its share is changed in place.
        asked: The engine arguments' ``gpu_memory_utilization``, which on a CPU is the share of
            its memory.
    """
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if (
        not current_platform.is_cpu()
        or cache.kv_cache_memory_bytes is not None
        or asked != CacheConfig.gpu_memory_utilization
    ):
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    share = _SHARE_OF_FREE * memory.available_memory / memory.total_memory
    cache.gpu_memory_utilization = round(share, 2)
    logger.info(
        "%.1f of %.1f GiB of memory are free; the engine reserves half of that "
        "(--gpu-memory-utilization %.2f) where vLLM would reserve %.0f %% of all. "
        "--kv-cache-memory-bytes sets the size of the KV cache alone.",
        memory.available_memory / 2**30,
        memory.total_memory / 2**30,
        share,
        100 * asked,
    )


@Symbols("engine.arg_utils:EngineArgs.", "vLLM reserves what is free", feature="beam").wraps(
    "create_engine_config", "CPU engines reserve what is free, and have blocks for beams"
)
def create_engine_config(
    original: Callable[..., VllmConfig], self: EngineArgs, *args: object, **kwargs: object
) -> VllmConfig:
    vllm_config = original(self, *args, **kwargs)
    shrink_blocks(vllm_config, self.block_size)
    reserve_what_is_free(vllm_config, self.gpu_memory_utilization)
    return vllm_config
