"""A CPU without AVX-512: vLLM's library and our kernel for AVX2, in a process that sees no more."""

from pathlib import Path

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
    assert hasattr(torch.cpu, name), name
    setattr(torch.cpu, name, lambda: False)
from vllm import LLM, SamplingParams
from tests.engine.beam.cases import check_case, prompt, request_of
from tests.engine.beam.oracle import Case
from vllm_trie.lab.local_engine import verifier_of
from tests.engine.prompts import prompts
from vllm_trie.attention import choose_kernels, kernels
from vllm_trie.attention.native import NativeKernels
from vllm_trie.lab.tiny_model import model_path

kernels.NativeKernels = lambda: NativeKernels("x86-64-v3")
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
SETTINGS = dict(
    model=str(model_path()), dtype="float32", enforce_eager=True, max_model_len=512,
    kv_cache_memory_bytes=20 << 20, max_num_seqs=8,
)
def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(some, PARAMS, use_tqdm=False)]

some = [p for p in prompts() if len(p["prompt_token_ids"]) < 400][:6]
trees = {"method": "ngram_trie", "num_speculative_tokens": 16, "node_budget": "fixed"}
llm = LLM(**SETTINGS, speculative_config=trees)
found = tokens(llm)
totals = verifier_of(llm).totals
assert totals.tokens > 1.2 * totals.steps
assert choose_kernels().instructions == "AVX2"
case = Case(prompt(4, 40), 3)
text, params = request_of(case)
(result,) = llm.generate([text], params, use_tqdm=False)
assert check_case(str(model_path()), case, result)
assert tokens(LLM(**SETTINGS)) == found
libraries = {line.rpartition("/")[2].strip() for line in open("/proc/self/maps")}
assert "_C_AVX2.abi3.so" in libraries
assert not {"_C.abi3.so", "_C_AVX512.abi3.so"} & libraries
"""


def test_without_avx512():
    if not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this CPU has no AVX2")
    run_python("-c", SCRIPT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
