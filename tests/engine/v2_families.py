"""Drafts on Model Runner V2 for families whose attention is not full, against plain V2, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object: what differs, and
accepted and rejected draft tokens, by family. The tests compare `TESTED` inside another program;
without names this one compares all families:

    python -m tests.engine.v2_families [FAMILY ...]
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config.mamba import MambaBackendEnum
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.engine.compare import differences, generate, largest_score_error, tell_oracle
from tests.engine.conftest import add_experts_group, runner_of
from tests.engine.drafters import OracleDrafter
from tests.engine.families import CHAINS as FAMILIES_WITH_CHAINS
from tests.engine.families import (
    CYCLE,
    FAMILIES,
    PARTIAL_TREES,
    VOCABULARY,
    WINDOW,
    take_text_for_images,
    write_model,
)
from tests.engine.v2_trees import put_in
from vllm_trie.drafts.engine.attention import cuda as cuda_attention
from vllm_trie.drafts.engine.runners import v2_trees
from vllm_trie.drafts.engine.workers import cpu_worker
from vllm_trie.drafts.engine.workers.cuda_worker import GPU_BACKEND_CLASS
from vllm_trie.extras.device_checks.gpu_check import check_device
from vllm_trie.extras.device_checks.kernel_check import RequestShape
from vllm_trie.hooks.start import limits

CHAINS = {"method": "ngram_trie", "num_speculative_tokens": 4, "node_budget": "fixed"}
TREES = {**CHAINS, "num_speculative_tokens": 12, "verification": "tree"}
EXPERTS = "Qwen 3 MoE"
"""Returns the experts of each token."""
IN_CHUNKS = "Llama 4"
"""Its trees are verified by the GPU's attention."""
IN_TREES = (EXPERTS, "Qwen 3 VL", "gpt-oss", IN_CHUNKS)
"""Verified as trees, most with the true path in them."""
TESTED = ("Gemma 2", "gpt-oss", "Llama 4", "Qwen 3 VL", EXPERTS)
"""Windows and soft caps, sinks, attention in chunks, and positions of images; and experts."""
SEARCHED = ("Qwen 3 VL", "gpt-oss")
"""Beams with positions in three dimensions (M-RoPE), and in two KV cache groups."""


def prompts() -> list[dict[str, list[int]]]:
    """Each repeats a phrase of its own; the longest one is computed in parts."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(CYCLE, VOCABULARY, 9 + i).tolist() for i in range(3)]
    return [{"prompt_token_ids": (p * 9)[: 20 + 27 * i]} for i, p in enumerate(phrases)]


def compare(name: str, folder: Path, num_tokens: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compare one family's engine with drafts with the plain one."""
    settings: dict[str, Any] = {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "detokenize": False,
    }
    requests = [SamplingParams(temperature=0.0, **settings)] * 3
    if name in IN_TREES:  # which give the tokens of seeds
        requests[1] = SamplingParams(temperature=0.8, seed=1, **settings)
    family = FAMILIES[name]
    model = write_model(folder / name.replace(" ", "-"), family, repeats=True)

    def engine(**options: Any) -> LLM:
        return LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=192,
            max_num_seqs=3,
            block_size=32,
            kv_cache_memory_bytes=8 << 20,
            max_num_batched_tokens=48,
            disable_log_stats=False,
            enable_return_routed_experts=name == EXPERTS,
            **family.engine,
            **options,
        )

    plain = engine()
    expected = generate(plain, prompts(), requests)
    if name == IN_CHUNKS:
        chains = with_the_devices_attention(lambda: engine(speculative_config=TREES), patch)
        check_chunks(runner_of(chains))
    else:
        chains = engine(speculative_config=TREES if name in IN_TREES else CHAINS)
    assert chains.llm_engine.vllm_config.scheduler_config.async_scheduling
    if name in IN_TREES:
        tell_oracle(expected)
        put_in(chains, OracleDrafter)
    outputs = generate(chains, prompts(), requests)
    if name == IN_CHUNKS:  # again, behind cached blocks
        outputs[2:] = generate(chains, prompts()[2:], requests[2:])
    counted = {m.name: m.value for m in chains.get_metrics() if hasattr(m, "value")}
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    drafted = counted["vllm:spec_decode_num_draft_tokens"]
    assert name != IN_CHUNKS or counted["vllm:prefix_cache_hits"] > 0
    _kept.extend((plain, chains))
    if name == EXPERTS:
        search = SamplingParams(n=2, temperature=0.0, max_tokens=2, extra_args={"beam_width": 2})
        with pytest.raises(ValueError, match="enable_return_routed_experts is not supported"):
            generate(chains, prompts(), search)
    return {
        "differences": differences(expected, outputs),
        "accepted": accepted,
        "rejected": drafted - accepted,
        "score_error": largest_score_error(plain, prompts(), 9) if name in SEARCHED else None,
        "other_experts": rows_with_other_experts(expected, outputs) if name == EXPERTS else None,
    }


def with_the_devices_attention(make: Callable[[], LLM], patch: pytest.MonkeyPatch) -> LLM:
    """Make an engine with trees whose attention is the GPU's kernels."""

    def choose_attention(for_trees: bool) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, GPU_BACKEND_CLASS)

    patch.setattr(cpu_worker, "choose_attention", choose_attention)
    patch.setattr(v2_trees.V2TreeAdapter, "_takes_chains", False)
    patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    llm = make()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()
    return llm


def check_chunks(runner: Any) -> None:
    """Run the check of a start on a GPU, and with a kernel that does not see the chunks."""
    stock = cuda_attention.tree_attention_triton

    def without_chunks(*arguments: Any) -> None:
        stock(*arguments[:-1], arguments[-1]._replace(chunk=0))

    steps = [[RequestShape(40, 1, 9), RequestShape(25, 15, 0)]]  # trees, and a prefill chunk
    shapes = check_device(runner, steps, splits=(1,)).shapes
    assert {shape.chunk for shape in shapes} == {0, WINDOW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_attention, "tree_attention_triton", without_chunks)
        with pytest.raises(RuntimeError, match=f"a step of layer .* chunks of {WINDOW}"):
            check_device(runner, steps, splits=(1,))


def rows_with_other_experts(expected: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Return, of each output, the number of tokens that other experts are returned for."""
    pairs = zip(expected, outputs, strict=True)
    return [
        int((a.outputs[0].routed_experts != b.outputs[0].routed_experts).any(axis=(1, 2)).sum())
        for a, b in pairs
    ]


def take_the_devices_recurrent_kernels() -> None:
    """Let recurrent layers run a GPU's Triton kernels; those for CPUs keep no state for drafts.

    Before the models' modules are imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "is_cpu", lambda self: False)
        for name in ("causal_conv1d", "mamba_ssm", "ssd_combined"):
            importlib.import_module(f"vllm.model_executor.layers.mamba.ops.{name}")
    from vllm.model_executor.layers.mamba import short_conv
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    registry_of_backends = ssu_dispatch._BACKEND_REGISTRY
    registry_of_backends[MambaBackendEnum.CPU] = registry_of_backends[MambaBackendEnum.TRITON]
    limits._has_state = lambda config: False  # as if this were a GPU
    short_conv.current_platform = SimpleNamespace(is_cpu=lambda: False)


_kept: list[LLM] = []
"""An engine that is freed ends the process groups of the others."""


def compare_families(names: Iterable[str], num_tokens: int) -> dict[str, Any]:
    """Compare families on Model Runner V2, by name."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        take_text_for_images(patch)
        take_the_devices_recurrent_kernels()
        for name in names:
            add_experts_group(patch)
            with patch.context() as of_family:
                results[name] = compare(name, Path(folder), num_tokens, of_family)
            print(name, results[name], flush=True)
    return results


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    v2_on_cpu.use_v2(True)
    # Long enough that outputs leave the window of `families.WINDOW` tokens.
    names = sys.argv[1:] or [*FAMILIES_WITH_CHAINS, *PARTIAL_TREES]
    print("RESULT " + json.dumps(compare_families(names, 40)))


if __name__ == "__main__":
    main()
