"""An engine whose cache lies as for AMX.

The kernels of vLLM that use it are made of its others, on any processor; one test has the real
ones.
"""

from __future__ import annotations

import logging

import pytest
import torch
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from tests.engine.beam.cases import prompt, request_of
from tests.engine.beam.oracle import Case
from tests.engine.compare import (
    accepted_tokens,
    differences,
    generate,
    largest_score_error,
    margins,
    plain_outputs,
    speculation,
)
from tests.engine.prompts import prompts
from vllm_trie.attention import choose_kernels, kernels
from vllm_trie.attention.cache_layout import slot_elements
from vllm_trie.attention.native import NativeKernels
from vllm_trie.drafts.engine.verification import compaction
from vllm_trie.hooks.start import cpu_cache
from vllm_trie.lab.local_engine import runner_of
from vllm_trie.native import usable_sets

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "bfloat16", "max_num_seqs": 8, **speculation("test_oracle", 24)}


@pytest.fixture
def vector(monkeypatch):
    """Have vLLM, and the plugin's kernels, do without AMX where there is one."""

    def isa(dtype, block_size, head_size=None, *more):  # as the ledger knows it
        return "vec"

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", isa)
    if choose_kernels().has_tiles:
        native = NativeKernels(usable_sets()[1])
        assert not native.has_tiles
        monkeypatch.setattr(kernels, "choose_kernels", lambda: native)


@pytest.fixture
def amx(monkeypatch, vector):
    """Have vLLM take AMX; return the calls of the plugin's kernels with that cache, by name."""
    attend, plan = ops.cpu_attention_with_kv_cache, ops.cpu_attn_get_scheduler_metadata

    def elements(half: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
        block_size, head_size = half.shape[2:]
        key, value = slot_elements(isa, block_size, head_size).split(head_size, dim=1)
        return key, value - block_size * head_size

    def update(key, value, key_cache, value_cache, slots, isa, **unused):
        block_size = key_cache.shape[2]
        for half, rows, where in zip(
            (key_cache, value_cache), (key, value), elements(key_cache, isa), strict=True
        ):
            block, offset = slots[:, None] // block_size, slots % block_size
            half.flatten(2)[block, :, where[offset]] = rows[: len(slots)].transpose(1, 2)

    def attend_in_pairs(query, key_cache, value_cache, block_table, **arguments):
        blocks, table = torch.unique(block_table, return_inverse=True)
        halves = []
        for half, paired, plain in zip(
            (key_cache, value_cache),
            elements(key_cache, "amx"),
            elements(key_cache, "vec"),
            strict=True,
        ):
            halves.append(torch.empty(len(blocks), *half.shape[1:], dtype=half.dtype))
            halves[-1].flatten(2)[:, :, plain] = half[blocks.long()].flatten(2)[:, :, paired]
        table = table.to(torch.int32)
        attend(query, *halves, block_table=table, **arguments)

    def called(name, place):
        original = getattr(NativeKernels, name)

        def kernel(self, *arguments):
            if isinstance(arguments[-1], str) and arguments[-1] == "amx":
                calls.append(f"{name} {place(arguments)}".strip())
            return original(self, *arguments)

        monkeypatch.setattr(NativeKernels, name, kernel)

    calls: list[str] = []
    called("tree_attention", lambda arguments: bool(arguments[3].row_array[:, 5].any()))
    called("move_slots", lambda arguments: "")
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", update)
    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", attend_in_pairs)
    monkeypatch.setattr(
        ops, "cpu_attn_get_scheduler_metadata", lambda **named: plan(**{**named, "isa": "vec"})
    )
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *arguments: "amx")
    cpu_cache.is_readable.cache_clear()
    yield calls
    cpu_cache.is_readable.cache_clear()


def _outputs(llm) -> list:
    """Of requests with trees and without in the same steps, and of searches."""
    params = [GREEDY.clone() for _ in range(8)]
    for quiet in params[1::3]:
        quiet.extra_args = {"speculation": False}
    search = request_of(Case(prompt(4, 40), 4))
    return [*generate(llm, prompts(8), params, 4), *llm.generate(*search, use_tqdm=False)]


@pytest.fixture
def expected(engine, vector):
    plain_outputs(engine(dtype="bfloat16", **speculation("test_oracle", 1)), prompts(8), GREEDY)
    return _outputs(engine(**OPTIONS))


def test_outputs_are_those_of_the_vector_kernel(engine, expected, amx):
    llm = engine(**OPTIONS, seed=1)
    layers = runner_of(llm).compilation_config.static_forward_context
    assert {layer.isa for layer in layers.values()} == {"amx"}
    assert differences(expected, _outputs(llm)) == []
    parts = {"tree_attention False", "tree_attention True", "move_slots"}
    assert set(amx) == parts


def test_moves_in_the_layout_of_others_show(engine, expected, amx, monkeypatch):
    move = compaction.move_slots_in_layers
    monkeypatch.setattr(compaction, "move_slots_in_layers", lambda *arguments: move(*arguments[:3]))
    assert differences(expected, _outputs(engine(**OPTIONS, seed=1)))


def test_an_unknown_layout_leaves_the_vector_kernel(engine, amx, monkeypatch, plugin_log):
    monkeypatch.setattr(
        cpu_cache, "slot_elements", lambda isa, *sizes: slot_elements("vec", *sizes)
    )
    with plugin_log.at_level(logging.WARNING, "vllm.vllm_trie"):
        llm = engine(**OPTIONS, seed=2)
    layers = runner_of(llm).compilation_config.static_forward_context
    assert {layer.isa for layer in layers.values()} == {"vec"}
    assert "packs keys and values for AMX otherwise" in plugin_log.text


@pytest.mark.skipif(not choose_kernels().has_tiles, reason="the processor has no AMX")
def test_tiles_differ_from_plain_vllm_at_near_ties_only(engine):
    """vLLM's kernels serve prompts and requests without a draft, tiles those with one."""
    params = GREEDY.clone()
    params.logprobs = 2
    quiet = params.clone()
    quiet.extra_args = {"speculation": False}
    some = prompts(12)
    plain = engine(dtype="bfloat16", max_num_seqs=8, seed=3)
    layers = runner_of(plain).compilation_config.static_forward_context
    assert {layer.isa for layer in layers.values()} == {"amx"}
    expected = plain_outputs(plain, some, params)
    llm = engine(**OPTIONS, seed=3)
    outputs = generate(llm, some, [quiet if i % 3 == 1 else params for i in range(12)], 4)
    margin_of = margins(expected, outputs)
    assert all(margin is None or margin < 0.15 for margin in margin_of)
    assert margin_of.count(None) >= 6
    assert accepted_tokens(llm) > 100
    assert largest_score_error(llm, prompts(2), 20) < 0.2
