"""Whether the KV cache of vLLM's CPU attention lies as this package reads it."""

from __future__ import annotations

import functools

import torch

from vllm_trie.attention.cache_layout import SUPPORTED_ISAS, slot_elements
from vllm_trie.hooks.ledger.record import Symbols

Symbols("_custom_ops:", "vLLM says how its kernels lay out the cache", platform="cpu")(
    "cpu_attn_reshape_and_cache",
    "called",
    "shows how AMX has keys and values packed",
    "key value key_cache value_cache slot_mapping isa",
)


@functools.cache
def is_readable(isa: str) -> bool:
    """Return whether the kernels know the cache layout of a kernel of vLLM's.

    That of ``amx`` follows the processor's instructions, so vLLM itself is asked to write a block.
    """
    return isa in SUPPORTED_ISAS and (isa != "amx" or _packs_as_expected(isa, 64, 64))


def _packs_as_expected(isa: str, block_size: int, head_size: int) -> bool:
    from vllm import _custom_ops as ops

    # All numbers differ.
    numbers = torch.arange(2 * block_size * head_size, dtype=torch.int16)
    key, value = numbers.view(torch.bfloat16).view(block_size, 1, -1).split(head_size, dim=2)
    cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=torch.bfloat16)
    slots = torch.arange(block_size)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    written = cache.view(torch.int16).flatten()
    return torch.equal(written[slot_elements(isa, block_size, head_size)].flatten(), numbers)
