"""The heads in compiled code against torch's."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafters.medusa.support import describe, make_medusa, make_requests, random_heads
from vllm_trie.drafters.medusa import compiled_heads
from vllm_trie.drafters.medusa.candidates import (
    HEADERS,
    LIBRARY,
    SOURCES,
    HeadLogits,
    top_candidates_torch,
)
from vllm_trie.drafters.medusa.compiled_heads import MAX_ROWS, CompiledHeads, in_huge_pages
from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads
from vllm_trie.native import DEFAULT_FLAGS, NativeLibrary

pytestmark = pytest.mark.skipif(not LIBRARY.is_available(), reason="no C++ compiler here")


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def instructions(request):
    """This machine's instructions, then AVX2's."""
    if request.param == "native":
        yield
        return
    if not {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this CPU has no AVX2")
    flags = [flag.replace("=native", f"={request.param}") for flag in DEFAULT_FLAGS]
    library = NativeLibrary("medusa", "Medusa core", SOURCES, HEADERS, flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_heads, "LIBRARY", library)
        yield


@st.composite
def cases(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """Heads of any shape, hidden states for them, temperatures, m and a number of threads."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*size):
        return torch.randn(*size, generator=generator)

    num_outputs = draw(st.one_of(st.integers(1, 150), st.integers(2000, 5000)))
    shape = HeadsShape(
        num_heads=draw(st.integers(1, 4)),
        num_layers=draw(st.integers(0, 2)),
        hidden_size=draw(st.sampled_from([1, 7, 16, 31, 32, 48, 64, 100])),
        vocab_size=3 * num_outputs,
        num_outputs=num_outputs,
        has_bias=draw(st.booleans()),
        shares_output=draw(st.booleans()),
    )
    heads = MedusaHeads(shape)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(normal(*parameter.shape) * shape.hidden_size**-0.5)
        heads.output_weight.mul_(draw(st.sampled_from([0.1, 3.0, 10.0])))
    if draw(st.booleans()):
        heads.token_map = torch.randperm(3 * num_outputs, generator=generator)[:num_outputs]
    heads = heads.to(draw(st.sampled_from(dtypes))).requires_grad_(False)
    states = normal(draw(st.integers(1, MAX_ROWS)), shape.hidden_size)
    used = draw(st.integers(1, shape.num_heads))
    temperatures = 0.5 + torch.rand(used, generator=generator)
    return heads, states.to(heads.output_weight.dtype), temperatures, draw(st.integers(1, 40))


def candidates_of(heads, temperatures, num_candidates, states):
    compiled = CompiledHeads(heads, temperatures, num_candidates)
    return compiled.top_candidates(compiled.rows(states))


def with_torch(heads, states, temperatures, num_candidates):
    """The twin, in float32: what is rounded on the way is up to each implementation."""
    exact = MedusaHeads(heads.shape).requires_grad_(False)
    exact.load_state_dict({k: v.float() for k, v in heads.state_dict().items() if k != "token_map"})
    logits = exact(states.float(), len(temperatures))
    return logits, HeadLogits(logits, temperatures, heads.token_map, num_candidates)


@pytest.mark.usefixtures("instructions")
@given(cases(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_candidates_are_those_of_torch(case, num_threads):
    heads, states, temperatures, num_candidates = case
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        tokens, probabilities = candidates_of(heads, temperatures, num_candidates, states)
    finally:
        torch.set_num_threads(before)
    logits, reading = with_torch(*case)
    _, expected = top_candidates_torch(reading)
    # bfloat16 may be rounded between the layers: 8 bits of a mantissa.
    coarse = states.dtype is torch.bfloat16
    tolerance = 0.02 * float(logits.abs().max()) + 0.01 if coarse else 0.0
    np.testing.assert_allclose(
        np.log(probabilities + 1e-30),
        np.log(expected + 1e-30),
        atol=tolerance / float(temperatures.min()) * 2 + 1e-3,
    )
    outputs = torch.from_numpy(tokens).long()
    if heads.token_map is not None:
        place = torch.full((heads.shape.vocab_size,), -1)
        place[heads.token_map] = torch.arange(len(heads.token_map))
        outputs = place[outputs]
    assert int(outputs.min()) >= 0
    chosen = logits.transpose(0, 1).gather(-1, outputs)
    wanted = logits.transpose(0, 1).topk(outputs.shape[-1]).values
    torch.testing.assert_close(chosen, wanted, rtol=1e-4, atol=2 * tolerance + 1e-4)
    for row in outputs.flatten(0, 1):
        assert len(set(row.tolist())) == len(row)


@pytest.mark.usefixtures("instructions")
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_many_threads_see_what_one_does(data):
    heads, states, temperatures, m = data.draw(cases())
    found = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, data.draw(st.integers(2, 4))):
            torch.set_num_threads(num_threads)
            found.append(candidates_of(heads, temperatures, m, states))
    finally:
        torch.set_num_threads(before)
    assert found[0][0].tolist() == found[1][0].tolist()
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["output_weight", "block_weight", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_reaches_only_what_it_touches(poison, where, dtype):
    """One head's weights at its last place, or one of the states."""
    heads = random_heads(num_heads=2).to(dtype)
    states = torch.randn(3, 16).abs().to(dtype)
    if where == "state":
        states[1, -1] = poison
    else:
        getattr(heads, where)[1].view(-1)[-1] = poison
    tokens, probabilities = candidates_of(heads, torch.ones(2), 5, states)
    assert ((tokens >= 0) & (tokens < 60)).all()
    for head in range(2):
        for row in range(3):
            touched = row == 1 if where == "state" else head == 1
            if not touched:
                assert (probabilities[row, head] > 0.0).all()
            elif not (poison == float("-inf") and where == "output_weight"):
                assert probabilities[row, head].tolist() == [0.0] * 5
            assert not np.isnan(probabilities[row, head]).any()


def test_equal_logits_are_told_in_order():
    heads = MedusaHeads(HeadsShape(2, 1, 16, 9000, 9000))
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        tokens, probabilities = candidates_of(heads, torch.ones(2), 40, torch.ones(1, 16))
        assert tokens[0].tolist() == [list(range(40))] * 2
        np.testing.assert_allclose(probabilities, 1 / 9000, rtol=1e-4)
    torch.set_num_threads(1)


def test_states_that_are_left_to_torch(monkeypatch):
    heads = random_heads()
    compiled = CompiledHeads(heads, torch.ones(3), 5)
    assert len(compiled.rows([torch.randn(16)] * MAX_ROWS)) == MAX_ROWS
    assert compiled.rows([torch.randn(16)] * (MAX_ROWS + 1)) is None
    assert compiled.rows([torch.randn(16).double()]) is None
    assert compiled.rows([torch.randn(16), torch.randn(32)[::2]]) is None
    # The drafter then asks torch, and gets the same trees.
    expected = describe(make_medusa(heads).propose(make_requests()))
    monkeypatch.setattr(compiled_heads, "MAX_ROWS", 0)
    found = describe(make_medusa(heads).propose(make_requests()))
    assert [tree[:2] for tree in found] == [tree[:2] for tree in expected]


def test_time_of_the_heads():
    heads = random_heads()
    compiled = CompiledHeads(heads, torch.ones(3), 5)
    compiled.top_candidates(compiled.rows(torch.randn(1, 16)))
    assert 0 < compiled.product_seconds < 1
    for options in ({}, {"joint": "product"}):
        drafter = make_medusa(random_heads(num_heads=4), **options)
        start = time.perf_counter()
        drafter.propose(make_requests())
        end = time.perf_counter()
        assert start < drafter.timing.asked < drafter.timing.asked + drafter.timing.products < end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_pages_hold_the_same(dtype):
    tensor = torch.randn(3, 700, 601).to(dtype)
    copy = in_huge_pages(tensor)
    assert torch.equal(copy, tensor)
    assert copy.shape == tensor.shape
    assert copy.data_ptr() % 4096 == 0
    small = torch.randn(5)
    assert in_huge_pages(small) is small


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_huge_pages_are_asked_for():
    """Of private memory: for shared memory another setting counts, which is mostly "never"."""
    copy = in_huge_pages(torch.zeros(3 << 20))
    address, inside = copy.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and inside:
            if "hg" not in rest:
                pytest.skip("this kernel has no huge pages")
            assert "sh" not in rest
            return
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
    raise AssertionError("the memory is mapped nowhere")
