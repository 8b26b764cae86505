"""Drafts on Model Runner V2 for families whose attention is not full, against plain V2, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object: what differs, and
accepted and rejected draft tokens, by family. The tests compare `TESTED` inside another program;
without names this one compares all families:

    python -m tests.engine.v2_families [FAMILY ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.engine.compare import (
    differences,
    draft_tokens,
    generate,
    largest_score_error,
    tell_oracle,
)
from tests.engine.conftest import add_experts_group
from tests.engine.drafters import OracleDrafter
from tests.engine.families import CHAINS as FAMILIES_WITH_CHAINS
from tests.engine.families import (
    FAMILIES,
    PARTIAL_TREES,
    WINDOW,
    repeated_phrases,
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
from vllm_trie.lab.local_engine import runner_of

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
PROMPTS = repeated_phrases(3)
"""The longest one is computed in parts."""
SEARCHED = ("Qwen 3 VL", "gpt-oss")
"""Beams with positions in three dimensions (M-RoPE), and in two KV cache groups."""


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
        return v2_on_cpu.start(
            model=model,
            skip_tokenizer_init=True,
            max_model_len=192,
            max_num_seqs=3,
            kv_cache_memory_bytes=8 << 20,
            enable_return_routed_experts=name == EXPERTS,
            **family.engine,
            **options,
        )

    plain = engine()
    expected = generate(plain, PROMPTS, requests)
    if name == IN_CHUNKS:
        chains = with_the_devices_attention(lambda: engine(speculative_config=TREES), patch)
        check_chunks(runner_of(chains))
    else:
        chains = engine(speculative_config=TREES if name in IN_TREES else CHAINS)
    assert chains.llm_engine.vllm_config.scheduler_config.async_scheduling
    if name in IN_TREES:
        tell_oracle(expected)
        put_in(chains, OracleDrafter)
    outputs = generate(chains, PROMPTS, requests)
    if name == IN_CHUNKS:  # again, behind cached blocks
        outputs[2:] = generate(chains, PROMPTS[2:], requests[2:])
    accepted, rejected = draft_tokens(chains)
    assert name != IN_CHUNKS or outputs[2].num_cached_tokens > 0
    if name == EXPERTS:
        search = SamplingParams(n=2, temperature=0.0, max_tokens=2, extra_args={"beam_width": 2})
        with pytest.raises(ValueError, match="enable_return_routed_experts is not supported"):
            generate(chains, PROMPTS, search)
    return {
        "differences": differences(expected, outputs),
        "accepted": accepted,
        "rejected": rejected,
        "score_error": largest_score_error(plain, PROMPTS, 9) if name in SEARCHED else None,
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


def compare_families(names: Iterable[str], num_tokens: int) -> dict[str, Any]:
    """Compare families on Model Runner V2, by name."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        take_text_for_images(patch)
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
