"""The compiled kernels, for each instruction set that this machine has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.processes import run_python
from tests.unit.attention.paged_cases import (
    HEAD_SIZES,
    PagedCase,
    RequestShape,
    attention_kind,
    laid_out,
    paged_case,
)
from vllm_trie.attention import TreeRow, build_tree_batch, move_slots, split_cache, tree_attention
from vllm_trie.attention.cache_layout import move_rows_in_layers
from vllm_trie.attention.native import NativeKernels
from vllm_trie.attention.tree_batch import NO_NODES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative to the value, and the smallest one.
OUTPUT_ROUNDING = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float16: (2.0**-11, 2.0**-25),
}
SOME_FIXTURES = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def _cpu_has(flag: str) -> bool:
    try:
        return flag in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


INSTRUCTIONS = [None, *["x86-64-v3"] * (_cpu_has("avx2") and _cpu_has("fma")), "baseline"]


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def native(request):
    return NativeKernels(request.param)


@pytest.fixture(scope="module")
def natives():
    """Of all instruction sets, for one case, whose oracle takes longer than they do."""
    return [NativeKernels(instructions) for instructions in INSTRUCTIONS]


@pytest.fixture(autouse=True)
def _restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(native: NativeKernels, case: PagedCase, isa: str = "vec") -> torch.Tensor:
    output = torch.full(case.query.shape, torch.nan, dtype=case.query.dtype)
    assert native.tree_attention(
        case.query,
        laid_out(case.kv_cache, isa),
        case.block_table,
        case.trees,
        case.scale,
        output,
        case.kind,
        isa,
    )
    return output


def check(natives: Sequence[NativeKernels], case: PagedCase) -> None:
    for native in natives:
        check_one(native, case)


def check_one(native: NativeKernels, case: PagedCase) -> None:
    """Within 1e-6 of the largest value, and the rounding of the output.

    In pairs the same, but for tiles: their weights are 2 ** -16 off at most.
    """
    expected = case.expected
    relative, smallest = OUTPUT_ROUNDING[case.query.dtype]
    results = [(run(native, case), 1e-6)]
    if case.query.dtype == torch.bfloat16 and not any(
        size % 32 for size in (case.query.shape[2], case.kv_cache.shape[2])
    ):
        results.append((run(native, case, "amx"), 1e-6 + 2.0**-16 * native.has_tiles))
        if not native.has_tiles:
            assert torch.equal(*(output for output, _ in results))
    for output, share in results:
        error = np.abs(output.double().numpy() - expected)
        allowed = share * max(1.0, case.largest_value) + relative * np.abs(expected) + smallest
        assert (error <= allowed).all(), (native.instructions, (error / allowed).max())


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    block_size = draw(st.sampled_from([16, 32, 48, 64, 96, 128, 160, 256]))
    head_size = draw(st.sampled_from(HEAD_SIZES))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    computed = st.one_of(
        st.integers(0, 40),
        st.integers(0, 300),
        st.integers(0, 6).map(lambda blocks: blocks * block_size % 512),
    )
    requests = [
        RequestShape(
            draw(computed),
            draw(st.sampled_from([1, 1, 1, 2, 7])),
            draw(st.one_of(st.integers(1, 20), st.integers(1, 150))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    torch.set_num_threads(draw(st.integers(1, 3)))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4, 7]))
    kind = attention_kind(
        num_heads,
        window=draw(st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 300))),
        chunk=draw(st.sampled_from([0, 0, 1, 16, 40, 256])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 0.5, 3.0, 50.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
    )
    return paged_case(
        requests,
        draw(st.sampled_from(DTYPES)),
        num_heads,
        num_kv_heads,
        head_size,
        block_size,
        draw(st.integers(0, 2**32)),
        chains=draw(st.booleans()),
        kind=kind,
    )


@settings(max_examples=60, **SOME_FIXTURES)
@given(case=cases())
def test_equals_float64(natives, case):
    check(natives, case)


KINDS = [
    {"window": 1},
    {"window": 5},  # its edge is in the trees
    {"window": 200},
    {"window": 5000},
    {"chunk": 16},
    {"chunk": 128},
    {"soft_cap": 2.0},
    {"sinks": True},
    {"window": 30, "chunk": 128, "soft_cap": 3.0, "sinks": True, "alibi": True},
]


def case_of(dtype: torch.dtype, options: dict, chains: bool = False) -> PagedCase:
    requests = [RequestShape(500, 1, 70), RequestShape(59, 6, 20), RequestShape(0, 300, 3)]
    kind = attention_kind(6, **options)
    return paged_case(requests, dtype, 6, 2, 64, 32, seed=2, chains=chains, kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_kinds_of_attention(natives, options, dtype):
    for chains, num_threads in ((False, 1), (True, 3)):
        torch.set_num_threads(num_threads)
        check(natives, case_of(dtype, options, chains))


@pytest.mark.parametrize("options", [kind for kind in KINDS if kind != {"window": 5000}], ids=str)
def test_a_part_of_the_kind_left_out_shows(options):
    native = NativeKernels()
    case = case_of(torch.float32, options)
    case = replace(case, kv_cache=case.kv_cache.nan_to_num())
    for option in options:
        kind = attention_kind(6, **{**options, option: 0})
        wrong = run(native, replace(case, kind=kind)).double().numpy()
        assert np.abs(wrong - case.expected).max() > 0.05 * case.largest_value, option


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_rows_that_need_several_units(natives, dtype, num_threads):
    """More rows than a unit of work holds, and threads that share units unevenly."""
    torch.set_num_threads(num_threads)
    requests = [RequestShape(400, 130, 64), RequestShape(0, 300, 3), RequestShape(777, 1, 1)]
    check(natives, paged_case(requests, dtype, 6, 2, 64, 32, seed=3))
    check(natives, paged_case([RequestShape(1500, 1, 9)], dtype, 1, 1, 128, 128, seed=4))


def test_scores_far_apart(native):
    """Weights that underflow against those seen before or later, across chunks and threads."""
    for scale_of_query in (1e-4, 30.0, 300.0):
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            case = paged_case([RequestShape(500, 1, 12)], torch.float32, 4, 2, 64, 64, seed=5)
            case.query.mul_(scale_of_query)
            error = np.abs(run(native, case).double().numpy() - case.expected)
            # The scores themselves are rounded, and so the weights in proportion to them.
            assert error.max() <= 1e-6 * max(1.0, scale_of_query) * case.largest_value


def test_other_rows_are_left_alone(native):
    case = paged_case([RequestShape(50, 1, 6)] * 3, torch.float32, 4, 2, 32, 32, seed=7)
    whole = run(native, case)
    trees = build_tree_batch(case.trees.rows[1:2], case.trees.ancestor_words[1:2], len(case.query))
    output = torch.full_like(whole, 7.0)
    native.tree_attention(case.query, case.kv_cache, case.block_table, trees, case.scale, output)
    assert torch.equal(output[7:14], whole[7:14])
    assert (output[:7] == 7.0).all()
    assert (output[14:] == 7.0).all()


KEPT_THREADS_SCRIPT = """
import os
import torch
from tests.unit.attention.paged_cases import RequestShape, paged_case
from tests.unit.attention.test_native import run
from vllm_trie.attention.native import NativeKernels

def threads():
    numbers.add_(1)  # takes every thread
    return sorted(os.listdir("/proc/self/task"))

torch.set_num_threads(4)
numbers, native = torch.zeros(10**6), NativeKernels()
before = threads()
assert len(before) >= 4
for num_rows in (1, 2, 3):
    native.likeliest(torch.randn(num_rows, 1000), 8)
    assert threads() == before, f"likeliest of {num_rows} rows"
for num_nodes in range(1, 9):  # with work for one thread, and for two to four
    run(native, paged_case([RequestShape(9, 1, num_nodes)], torch.float32, 8, 2, 32, 32, seed=1))
    assert threads() == before, f"attention of {num_nodes} nodes"
"""


def test_calls_with_little_work_keep_the_threads_of_torch():
    """In a process of its own, whose threads no other test starts."""
    run_python("-c", KEPT_THREADS_SCRIPT)


def test_calls_from_several_threads(native):
    """ctypes lets other threads run meanwhile: calls must not share memory."""
    torch.set_num_threads(2)
    batches = [
        paged_case([RequestShape(600 + 50 * i, 1, 20)], torch.float32, 4, 1, 64, 32, seed=i)
        for i in range(3)
    ]
    expected = [run(native, case) for case in batches]
    wrong: list[int] = []

    def repeat(index: int) -> None:
        for _ in range(20):
            if not torch.allclose(run(native, batches[index]), expected[index], atol=2e-6):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def stock_attention(vllm_operations):
    """vLLM's own CPU kernel."""

    def attend(case: PagedCase) -> torch.Tensor:
        rows = case.trees.rows
        _, num_kv_heads, block_size, _ = case.kv_cache.shape
        num_heads, head_size = case.query.shape[1:]
        isa = "vec" if head_size % 32 == 0 and block_size % 32 == 0 else "vec16"
        starts = torch.tensor([0, *np.cumsum([r.num_queries for r in rows])], dtype=torch.int32)
        seq_lens = torch.tensor([row.seq_len for row in rows], dtype=torch.int32)
        # Without the window, as the plugin plans for rows without trees.
        plan = torch.ops._C.get_scheduler_metadata(
            *(len(rows), num_heads, num_kv_heads, head_size, seq_lens, case.query.dtype, starts),
            *(True, -1, isa, True, None, "auto"),
        )
        # The stock kernel cannot do with NaN in unused slots.
        cache = case.kv_cache.nan_to_num()
        halves = cache.view(cache.shape[0], num_kv_heads, 2 * block_size, head_size)
        keys, values = halves.chunk(2, dim=2)
        output = torch.empty_like(case.query)
        torch.ops._C.cpu_attention_with_kv_cache(
            *(case.query, keys, values, output, starts, seq_lens, case.scale, True),
            *(case.kind.alibi_slopes, case.kind.window or -1, case.block_table),
            *(case.kind.soft_cap, plan, case.kind.sinks, None, 1.0, 1.0, "auto"),
        )
        return output

    return attend


@pytest.mark.parametrize("options", [kind for kind in KINDS if "chunk" not in kind], ids=str)
def test_kinds_equal_the_stock_kernel(native, stock_attention, options):
    case = case_of(torch.float32, options, chains=True)
    difference = (run(native, case) - stock_attention(case)).abs()
    assert difference.max() <= 2e-6 * case.largest_value


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_chain_equals_the_stock_kernel(native, stock_attention, head_size):
    """On chains, float32 differs from vLLM's kernel by rounding only."""
    requests = [RequestShape(70, 1, 12), RequestShape(256, 3, 33), RequestShape(0, 1, 7)]
    case = paged_case(requests, torch.float32, 6, 2, head_size, 32, seed=head_size, chains=True)
    difference = (run(native, case) - stock_attention(case)).abs()
    assert difference.max() <= 2e-6 * case.largest_value
    assert difference.mean() <= 1e-7 * case.largest_value


@pytest.mark.parametrize(
    ("dtype", "isa"), [*((dtype, "vec") for dtype in DTYPES), (torch.bfloat16, "amx")]
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_move_slots(native, dtype, isa, num_threads):
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(num_threads)
    head_size = 96 if isa == "amx" else 80
    caches = [torch.randn(5, 3, 32, 2 * head_size, generator=generator).to(dtype) for _ in range(4)]
    slots = torch.randperm(5 * 32, generator=generator)
    source, target = slots[:20], slots[10:30]  # they overlap
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        move_slots(cache, source, target, isa)
    assert native.move_slots(caches, source, target, isa)
    for cache, expected_cache in zip(caches, expected, strict=True):
        assert torch.equal(cache, expected_cache)


def test_move_slots_of_other_caches(native):
    """What is remembered of one call's caches is not believed of another's."""
    caches = [torch.randn(2, 1, 32, 64) for _ in range(3)]
    source, target = torch.tensor([5, 40]), torch.tensor([40, 2])
    assert native.move_slots(caches, source, target)
    for others in (caches[:2], [*caches[:2], torch.randn(2, 1, 32, 64)]):
        expected = [cache.clone() for cache in others]
        for cache in expected:
            move_slots(cache, source, target)
        assert native.move_slots(others, source, target)
        assert all(map(torch.equal, others, expected))
    assert not native.move_slots([caches[0], torch.randn(2, 2, 32, 64)], source, target)


def test_shapes_that_no_vllm_kernel_has_are_refused():
    case = paged_case([RequestShape(20, 1, 5)], torch.float32, 2, 1, 24, 8, seed=8)
    output = torch.zeros_like(case.query)
    with pytest.raises(ValueError, match=r"query of torch.float32 \[6, 2, 24\] .* multiple of 16"):
        tree_attention(case.query, case.kv_cache, case.block_table, case.trees, case.scale, output)


def test_refuses_what_it_would_get_wrong(native):
    case = paged_case([RequestShape(20, 1, 5)], torch.float32, 2, 1, 32, 32, seed=9)
    output = torch.zeros_like(case.query)
    arguments = (case.query, case.kv_cache, case.block_table, case.trees, case.scale, output)
    wrong = {
        0: case.query.transpose(0, 1).contiguous().transpose(0, 1),  # another memory layout
        1: case.kv_cache.bfloat16(),
        2: case.block_table.long(),
        4: 0.0,
        5: output.double(),
    }
    for index, value in wrong.items():
        changed = [*arguments[:index], value, *arguments[index + 1 :]]
        assert not native.tree_attention(*changed), index
    assert not native.tree_attention(*arguments, case.kind, "amx")  # bfloat16 alone
    assert not native.tree_attention(*arguments, case.kind, "neon")
    assert (output == 0.0).all()
    slots = torch.tensor([0]), torch.tensor([1])
    assert not native.move_slots([case.kv_cache, case.kv_cache[:1]], *slots)
    assert not native.move_slots([case.kv_cache], *slots, "amx")
    assert not native.move_slots([case.kv_cache.bfloat16()[:, :, :16]], *slots, "amx")


@settings(max_examples=25, **SOME_FIXTURES)
@given(st.data())
def test_requests_that_share_slots(natives, data):
    """Each gets what it gets alone; slots behind its own ones hold NaN."""
    num_shared, num_private = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 70))
    num_rows, block_size = data.draw(st.integers(1, 90)), data.draw(st.sampled_from([16, 48, 128]))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    num_heads = data.draw(st.sampled_from([2, 8]))
    soft_cap = data.draw(st.sampled_from([0.0, 0.5, 50.0]))
    case = paged_case(
        [RequestShape(8, 1, 0)] + [RequestShape(num_shared + num_private - 1, 1, 0)] * num_rows,
        data.draw(st.sampled_from(DTYPES)),
        num_heads,
        2,
        data.draw(st.sampled_from(HEAD_SIZES)),
        block_size,
        data.draw(st.integers(0, 2**32)),
        kind=attention_kind(num_heads, soft_cap=soft_cap, sinks=data.draw(st.booleans())),
    )
    slots = np.arange(num_shared)
    block, offset = case.block_table[1:].long()[:, slots // block_size], slots % block_size
    keys, values = split_cache(case.kv_cache)
    keys[block, :, :, offset] = keys[block[:1], :, :, offset].clone()
    values[block, :, offset] = values[block[:1], :, offset].clone()
    length = num_shared + num_private
    rows = [TreeRow(0, 0, 1, 0, 9), TreeRow(1, 1, num_rows, 0, length, num_shared)]
    shared = build_tree_batch(rows, [NO_NODES] * 2, 1 + num_rows)
    check(natives, replace(case, trees=shared))


def test_move_rows_of_gpu_caches():
    keys, values = split_cache(torch.randn(4, 3, 16, 2 * 32))
    cpu_cache = torch.empty(4, 3, 16, 2 * 32)
    split_cache(cpu_cache)[0].copy_(keys)
    split_cache(cpu_cache)[1].copy_(values)
    cache = torch.cat([keys.transpose(2, 3), values], dim=-1)
    source, target = torch.tensor([5, 40, 41, 63]), torch.tensor([40, 41, 2, 17])
    move_slots(cpu_cache, source, target)
    other = cache.flip(0)
    before = other.clone()
    move_rows_in_layers([cache, other], source, target)
    moved_keys, moved_values = split_cache(cpu_cache)
    assert torch.equal(cache, torch.cat([moved_keys.transpose(2, 3), moved_values], dim=-1))
    move_rows_in_layers([before], source, target)
    assert torch.equal(other, before)
