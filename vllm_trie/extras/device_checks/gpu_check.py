"""The check of tree attention and compaction on a GPU, before an engine serves from it.

Tree attention ran on one device, an H200: others, or another Triton, must not give a wrong token.
Random steps therefore go through the layers' own attention, in their own cache, and the results are
compared with float64. A failure refuses the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_trie.attention.device_copy import to_device
from vllm_trie.attention.gpu_launch import lengths_of_launches, padded_group
from vllm_trie.drafts.engine.attention.tree_attention import TREE_ATTRIBUTE
from vllm_trie.drafts.engine.verification import compaction
from vllm_trie.extras.device_checks.kernel_check import (
    BATCHES,
    TOLERANCE,
    LayerShape,
    RequestShape,
    Step,
    check_kernel,
    fill_cache,
    num_blocks_of,
    random_step,
    relative_error,
)

logger = init_logger(f"vllm.{__name__}")

_MAX_BLOCKS = 256
_SHORT_WINDOW = 50


class CheckedLayer(NamedTuple):
    """A layer that stands for all with its shape and cache layout."""

    name: str
    layer: Any
    builder: Any
    """vLLM's metadata builder of its group."""
    shape: LayerShape
    kv_cache: torch.Tensor
    """The first blocks of the layer's cache: all of it may be most of the device's memory."""

    def typed(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return a cache as what it holds; vLLM declares quantized ones as bytes."""
        return kv_cache.view(self.shape.cache_dtype)


class DeviceCheck(NamedTuple):
    """Result of :func:`check_device`."""

    num_steps: int
    shapes: tuple[LayerShape, ...]
    largest_error: float
    """Error of tree attention, relative to the largest value in the cache."""
    seconds: float


def check_device(
    runner: Any, batches: Sequence[Sequence[RequestShape]] = BATCHES, splits: Sequence[int] = ()
) -> DeviceCheck:
    """Refuse to serve if a result is wrong or a call raises; log one line otherwise.

    Args:
        runner: the model runner, with its KV cache and before any request. The cache is written to
            and zeroed again.
        batches: one step each; steps that the cache cannot hold are left out.
        splits: see :func:`vllm_trie.extras.device_checks.kernel_check.check_kernel`.

    Raises:
        RuntimeError: naming what went wrong.
    """
    start = time.perf_counter()
    try:
        result = _check(runner, batches, splits, start)
        # A fault of the device may show only now.
        torch.get_device_module(runner.device).synchronize()
    except Exception as error:
        kind = "" if isinstance(error, _WrongResult) else f"{type(error).__name__}: "
        raise RuntimeError(
            "vllm-trie's tree attention does not work on this device, so the engine does not "
            f"start: {kind}{error}. Run without vllm-trie's speculative methods, and please report "
            "what `vllm-trie validate` prints"
        ) from error
    logger.info(
        "vllm-trie: tree attention checked on %s: %d random steps through the model's layers (%s), "
        "largest error %.2g of the largest value; compaction exact; %.1f s",
        runner.device,
        result.num_steps,
        "; ".join(map(str, result.shapes)),
        result.largest_error,
        result.seconds,
    )
    return result


class _WrongResult(Exception):
    """A computed result differs from the expected one."""


def _check(
    runner: Any, batches: Sequence[Sequence[RequestShape]], splits: Sequence[int], start: float
) -> DeviceCheck:
    largest, num_steps, shapes = 0.0, 0, []
    for checked in _layers_to_check(runner):
        shapes.append(checked.shape)
        # The compiled kernel is the same for every window and chunk; one that is short shows.
        shape = checked.shape._replace(
            window=min(checked.shape.window, _SHORT_WINDOW),
            chunk=min(checked.shape.chunk, _SHORT_WINDOW),
        )
        kernel = check_kernel(shape, runner.device, batches, splits)
        if not kernel.passed:
            raise _WrongResult(
                f"the kernel's error is {kernel.largest_error:.2g} of the largest value, allowed "
                f"is {kernel.tolerance:.2g} ({checked.shape})"
            )
        largest = max(largest, kernel.largest_error)
        num_steps += kernel.num_steps
        generator = np.random.default_rng(1)
        num_blocks, impl = len(checked.kv_cache), checked.layer.impl
        group = padded_group(shape.num_heads, shape.num_kv_heads)
        lengths = lengths_of_launches(
            checked.builder.longest_decode, group, shape.head_size, shape.dtype
        )
        # Those of each length compile all launches: no request waits for one.
        steps = [
            random_step(checked.shape, requests, num_blocks, generator, impl.sinks, impl.scale)
            for requests in [*batches, *([RequestShape(30, length, 0)] for length in lengths)]
            if num_blocks_of(requests, checked.shape) <= num_blocks
        ]
        # The steps are drawn for a quantized cache without factors.
        scales = (checked.layer._k_scale, checked.layer._v_scale)
        of_model = [scale.clone() for scale in scales]
        try:
            for scale in scales:
                scale.fill_(1.0)
            for step in steps:
                largest = max(largest, _check_step(checked, step, generator))
                num_steps += 1
        finally:
            checked.kv_cache.zero_()
            for scale, kept in zip(scales, of_model, strict=True):
                scale.copy_(kept)
    return DeviceCheck(num_steps, tuple(shapes), largest, time.perf_counter() - start)


def _layers_to_check(runner: Any) -> Iterator[CheckedLayer]:
    """Yield one layer of each shape and layout, of those that trees go through: a trained drafter's
    may have another backend."""
    layers: Mapping[str, Any] = runner.compilation_config.static_forward_context
    seen = set()
    for groups in runner.attn_groups:
        for group in groups:
            for name in group.layer_names:
                layer = layers[name]
                if not getattr(layer.impl, "attends_to_trees", False):
                    continue
                cache = layer.kv_cache
                is_quantized = cache.dtype == torch.uint8
                if cache.dtype != runner.dtype and not is_quantized:
                    raise _WrongResult(
                        f"the KV cache of layer {name} is {cache.dtype} and the model "
                        f"{runner.dtype}; set kv_cache_dtype='auto'"
                    )
                kind = layer.impl.kind_of(layer)
                shape = LayerShape(
                    layer.impl.num_heads,
                    layer.impl.num_kv_heads,
                    layer.impl.head_size,
                    cache.shape[2],
                    runner.dtype,
                    layer.impl.fp8_dtype if is_quantized else None,
                    kind.window,
                    kind.chunk,
                    kind.soft_cap,
                    layer.impl.sinks is not None,
                )
                if (shape, cache.stride()) not in seen:
                    seen.add((shape, cache.stride()))
                    yield CheckedLayer(
                        name, layer, group.get_metadata_builder(), shape, cache[:_MAX_BLOCKS]
                    )


def _check_step(checked: CheckedLayer, step: Step, generator: np.random.Generator) -> float:
    """Run one step through a layer and move its KV as after a verification."""
    device = checked.kv_cache.device
    _check_layout(checked, step)
    output = torch.full_like(step.query, torch.nan).to(device)
    # vLLM's queries are a view of what the projection gives, with keys and values behind them.
    num_heads = step.query.shape[1]
    query = torch.cat([step.query] * 2, dim=1).to(device)[:, :num_heads]
    metadata = _metadata(checked.builder, step, device)
    setattr(metadata, TREE_ATTRIBUTE, step.trees if step.trees.rows else None)
    unused = query[:, : step.keys.shape[1]]
    impl = checked.layer.impl
    arguments = (checked.layer, query, unused, unused, checked.kv_cache, metadata)
    impl.forward(*arguments, output)
    stock = torch.full_like(output, torch.nan)
    impl.stock_forward(*arguments[:-1], metadata.stock, stock)
    lengths = np.diff(step.starts)
    in_chunks = ~step.tree_rows & np.repeat(lengths > metadata.longest_decode, lengths)
    chunks = torch.from_numpy(in_chunks)
    attended = output.cpu()
    error = relative_error(attended[~chunks], step.expected()[~chunks], step)
    tolerance = TOLERANCE[checked.shape.dtype]
    if error > tolerance:
        raise _WrongResult(
            f"a step of layer {checked.name} has an error of {error:.2g} of the largest value, "
            f"allowed is {tolerance:.2g} ({checked.shape})"
        )
    if not torch.equal(attended[chunks], stock.cpu()[chunks]):
        raise _WrongResult(
            f"a step of layer {checked.name} does not leave prefill chunks to vLLM's kernel "
            f"({checked.shape})"
        )
    _check_compaction(checked, step, generator)
    return error


def _check_layout(checked: CheckedLayer, step: Step) -> None:
    """Write the step's keys and values as vLLM does, and compare with the expected cache."""
    cache = checked.kv_cache
    expected = torch.empty_like(cache)
    fill_cache(checked.typed(expected), step)
    cache.copy_(expected)
    slots = to_device(step.slots, cache.device)
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = 0
    checked.layer.impl.do_kv_cache_update(
        checked.layer, step.keys.to(cache.device), step.values.to(cache.device), cache, slots
    )
    if not torch.equal(cache, expected):
        raise _WrongResult(
            f"vLLM lays out the KV cache of layer {checked.name} differently from what vllm-trie "
            "reads"
        )


def _metadata(builder: Any, step: Step, device: torch.device) -> Any:
    lengths = np.diff(step.starts)
    return builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=to_device(step.starts, device),
            query_start_loc_cpu=torch.from_numpy(step.starts),
            seq_lens=to_device(step.seq_lens, device),
            num_reqs=len(lengths),
            num_actual_tokens=int(step.starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(step.seq_lens.max()),
            block_table_tensor=to_device(step.block_table, device),
            slot_mapping=to_device(step.step_slots(), device),
        ),
    )


def _check_compaction(checked: CheckedLayer, step: Step, generator: np.random.Generator) -> None:
    """Move random nodes' KV to the front and compare the whole cache with the expected one."""
    accepted: list[list[int]] = [[] for _ in step.seq_lens]
    for row in step.trees.rows:
        if row.num_nodes > 1:  # without the first node, which would stay where it is
            length = int(generator.integers(1, min(8, row.num_nodes - 1) + 1))
            nodes = 1 + generator.choice(row.num_nodes - 1, length, replace=False)
            accepted[row.batch_index] = sorted(nodes.tolist())
    moves = compaction.moved_tokens(step.trees.rows, accepted)
    cache = checked.kv_cache
    expected = cache.clone()
    slots = step.step_slots()
    block_size = cache.shape[2]
    for source, target in slots[moves].T:
        expected[target // block_size, :, target % block_size] = cache[
            source // block_size, :, source % block_size
        ]
    group = compaction.CacheGroup(0, (cache,), checked.layer.impl.move_slots)
    device = cache.device
    compaction.compact([group], [to_device(slots, device)], *to_device(moves, device))
    if not torch.equal(cache, expected):
        raise _WrongResult(f"moving KV in the cache of layer {checked.name} gave a wrong cache")
