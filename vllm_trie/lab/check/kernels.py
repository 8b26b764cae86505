"""Tree attention and moves of KV against exact results, and the kernel in CUDA graphs."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.attention import (
    choose_kernels,
    move_slots_in_layers,
    split_cache,
    tree_attention,
)
from vllm_trie.extras.device_checks.kernel_check import (
    BATCHES,
    TOLERANCE,
    KernelCheck,
    LayerShape,
    RequestShape,
    Step,
    check_kernel,
    fill_cache,
    num_blocks_of,
    random_step,
    relative_error,
)
from vllm_trie.lab.check.parts import Outcome, Settings
from vllm_trie.lab.local_engine import kv_shape, text_config

TYPICAL_LAYERS = (
    LayerShape(32, 8, 128, 16, torch.bfloat16),
    LayerShape(28, 4, 128, 16, torch.float16),
    LayerShape(16, 16, 64, 32, torch.float32),
)
FURTHER_LAYERS = (
    LayerShape(8, 1, 128, 32, torch.bfloat16),
    LayerShape(12, 12, 64, 16, torch.bfloat16),
    LayerShape(14, 2, 64, 16, torch.bfloat16),
    LayerShape(8, 8, 80, 16, torch.float16),
    LayerShape(8, 2, 96, 16, torch.bfloat16),
    LayerShape(16, 8, 256, 16, torch.bfloat16),
    LayerShape(32, 8, 128, 16, torch.float32),
    LayerShape(64, 8, 64, 16, torch.bfloat16, window=128, has_sinks=True),
    LayerShape(8, 4, 256, 16, torch.float16, window=100, soft_cap=50.0),
    LayerShape(40, 8, 128, 16, torch.bfloat16, chunk=100),
)
"""Checked without `--quick`: other head sizes, numbers of query heads for each KV head, and kinds
of attention."""
GRAPH_LAYER = LayerShape(32, 8, 128, 16, torch.bfloat16)
MOVED = 24
NODES = 32
Check = Callable[[LayerShape, torch.device], KernelCheck]
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on fixed buffers and returns its replay."""


def check_attention(settings: Settings) -> Outcome:
    """Compare the device's kernel with float64 attention, for many shapes of layers."""
    device, kernel, check = _device_kernel()
    layers = [*_model_layers(settings.model), *TYPICAL_LAYERS]
    layers += () if settings.quick else FURTHER_LAYERS
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        layers = [layer for layer in layers if capability >= layer.min_capability]
    rows, wrong, measured, steps = [], [], {}, 0
    for layer in dict.fromkeys(layers):
        try:
            result = check(layer, device)
            good, error = result.passed, f"{result.largest_error:.2g}"
            allowed, steps = f"{result.tolerance:.2g}", steps + result.num_steps
        except Exception as raised:  # compilers and drivers fail in their own ways
            traceback.print_exc()
            good, error, allowed = False, f"{type(raised).__name__}: {raised}"[:500], ""
        measured[str(layer)] = error
        rows.append(f"| {layer} | {' '.join(error.split())} | {allowed} |")
        wrong += [] if good else [str(layer)]
    if device.type == "cpu" and (moved := wrong_moves()):
        wrong.append(f"moves of KV ({moved})")
    header = ["| layer | largest error, of the largest value | allowed |", "| --- | --- | --- |"]
    return Outcome(
        status="failed" if wrong else "passed",
        summary=f"{kernel}: wrong for {'; '.join(wrong)}"
        if wrong
        else f"{kernel}: {steps} random steps through {len(rows)} kinds of layers are right",
        details=[*header, *rows],
        measured=measured,
    )


def _device_kernel() -> tuple[torch.device, str, Check]:
    if torch.cuda.is_available():
        return torch.device("cuda", 0), "Triton", check_kernel
    return torch.device("cpu"), choose_kernels().instructions, check_cpu_kernel


def _model_layers(model: str) -> list[LayerShape]:
    """Return the model's own layers in each dtype; none for a model without such heads."""
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return []
    return [LayerShape(heads, *kv_shape(config), 16, dtype) for dtype in TOLERANCE]


def check_cpu_kernel(shape: LayerShape, device: torch.device) -> KernelCheck:
    """Run the CPU's tree attention on random steps, one for each of :data:`BATCHES`."""
    generator = np.random.default_rng(0)
    largest = 0.0
    for requests in BATCHES:
        num_blocks = num_blocks_of(requests, shape) + 2
        step = random_step(shape, requests, num_blocks, generator)
        size = (num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_size)
        filled = torch.empty(size, dtype=shape.dtype)
        fill_cache(filled, step)
        cache = torch.empty(size, dtype=shape.dtype)
        keys, values = split_cache(cache)
        keys.copy_(filled[..., : shape.head_size].transpose(2, 3))
        values.copy_(filled[..., shape.head_size :])
        output = torch.zeros_like(step.query)
        table = torch.from_numpy(step.block_table)
        tree_attention(step.query, cache, table, step.trees, step.scale, output, step.kind)
        rows = torch.from_numpy(step.tree_rows)
        largest = max(largest, relative_error(output[rows], step.expected()[rows], step))
    return KernelCheck(len(BATCHES), largest, TOLERANCE[shape.dtype])


def wrong_moves() -> str:
    """Move the KV of random slots on the CPU; return the dtypes in which it went wrong."""
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for dtype in TOLERANCE:
        caches = [torch.randn(8, 2, 32, 128, generator=generator).to(dtype) for _ in range(3)]
        slots = torch.randperm(8 * 32, generator=generator)
        source, target = slots[:MOVED], slots[MOVED : 2 * MOVED]
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            keys, values = split_cache(cache)
            for start, end in zip(source.tolist(), target.tolist(), strict=True):
                (a, i), (b, j) = divmod(start, 32), divmod(end, 32)
                keys[b, :, :, j], values[b, :, j] = keys[a, :, :, i], values[a, :, i]
        move_slots_in_layers(caches, source, target)
        if not all(map(torch.equal, caches, expected)):
            wrong.append(str(dtype).removeprefix("torch."))
    return ", ".join(wrong)


def check_graphs(settings: Settings) -> Outcome:
    """Capture the kernel in a CUDA graph and replay it with other trees in the same buffers."""
    if not torch.cuda.is_available():
        return Outcome(status="not applicable", summary="no CUDA")
    from vllm_trie.attention.triton_kernel import NUM_SPLITS

    device = torch.device("cuda", 0)
    shape = GRAPH_LAYER
    if torch.cuda.get_device_capability(device) < shape.min_capability:
        shape = shape._replace(dtype=torch.float16)
    errors = {splits: replay_errors(shape, device, splits, capture_graph) for splits in NUM_SPLITS}
    return graph_outcome(shape, errors)


def graph_outcome(shape: LayerShape, errors: dict[int, list[float]]) -> Outcome:
    """Judge the errors of replays, by number of splits."""
    allowed = TOLERANCE[shape.dtype]
    wrong = [
        n for n, of_replays in errors.items() if not all(error <= allowed for error in of_replays)
    ]
    largest = max(max(of_replays) for of_replays in errors.values())
    text = f"largest error {largest:.2g} of the largest value, allowed is {allowed:.2g} ({shape})"
    if wrong:
        text = f"replays are wrong with {', '.join(map(str, wrong))} programs a request: {text}"
    return Outcome(
        status="failed" if wrong else "passed",
        summary=text,
        measured={str(splits): of_replays for splits, of_replays in errors.items()},
    )


def capture_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work on the device in a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, which a capture does not allow
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def replay_errors(
    shape: LayerShape, device: torch.device, splits: int, capture: Capture
) -> list[float]:
    """Return the error of each replay: other trees, contexts, blocks and values, then the first
    step again."""
    from vllm_trie.attention.gpu_launch import TreeBuffers
    from vllm_trie.attention.triton_kernel import tree_attention_triton

    generator = np.random.default_rng(3)
    # Equal numbers of nodes and blocks: a graph stands for a bucket of sizes.
    steps = [
        random_step(shape, [RequestShape(n, 1, NODES) for n in lengths], 64, generator)
        for lengths in ((300, 33), (280, 40), (290, 35))
    ]
    first = steps[0]
    size = (64, shape.block_size, shape.num_kv_heads, 2 * shape.head_size)
    cache = torch.empty(size, dtype=shape.dtype, device=device).transpose(1, 2)
    query = first.query.to(device)
    num_words = max(step.trees.word_array.size for step in steps)
    programs = splits * shape.num_kv_heads * len(query)
    buffers = TreeBuffers(len(first.seq_lens), num_words, shape.head_size, programs, device)
    table = torch.zeros(2, 64, dtype=torch.int32, device=device)
    starts, seq_lens = (
        torch.from_numpy(array).to(device) for array in (first.starts, first.seq_lens)
    )
    output = torch.empty_like(query)

    def load(step: Step) -> None:
        fill_cache(cache, step)
        query.copy_(step.query)
        table[:, : step.block_table.shape[1]].copy_(torch.from_numpy(step.block_table))
        starts.copy_(torch.from_numpy(step.starts))
        seq_lens.copy_(torch.from_numpy(step.seq_lens))
        buffers.write(step.trees)

    load(first)
    sizes = (table, starts, seq_lens, buffers, first.scale, output, NODES + 1)
    replay = capture(lambda: tree_attention_triton(query, cache, *sizes, num_splits=splits))
    errors = []
    for step in [*steps, first]:
        load(step)
        output.fill_(torch.nan)
        replay()
        errors.append(relative_error(output.cpu(), step.expected(), step))
    return errors
