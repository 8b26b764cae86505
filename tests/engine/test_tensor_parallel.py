"""Two tensor-parallel ranks: the output of one, also when the ranks' drafters do not agree."""

from __future__ import annotations

import json
import os

import pytest
from vllm import SamplingParams

from tests.engine.beam.cases import few_cases
from tests.engine.compare import generate
from tests.engine.prompts import prompts
from tests.engine.rank_faults import FAULTS, METHOD, fault_of, write_entry_point
from tests.processes import ROOT, run_python
from vllm_trie.lab.tiny_model import medusa_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

MAX_TOKENS = 40


def chosen_prompts() -> list[list[int]]:
    """Eight prompts, two for each fault."""
    chosen: dict[str, list[list[int]]] = {fault: [] for fault in FAULTS}
    for prompt in prompts():
        tokens = prompt["prompt_token_ids"]
        for length in range(len(tokens), max(20, len(tokens) - len(FAULTS)), -1):
            kind = chosen[fault_of(length)]
            if len(kind) < 2:
                kind.append(tokens[:length])
                break
    assert all(len(kind) == 2 for kind in chosen.values())
    return [tokens for kind in chosen.values() for tokens in kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Outputs and counters of an engine with two ranks, and what its processes logged."""
    folder = tmp_path_factory.mktemp("ranks")
    write_entry_point(folder)
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "prompts": chosen_prompts(),
                "max_tokens": MAX_TOKENS,
                "speculative_config": {
                    "method": METHOD,
                    "model": str(medusa_path()),
                    "num_speculative_tokens": 16,
                },
            }
        )
    )
    done = run_python(
        *("-m", "tests.engine.tensor_parallel_run", str(job)),
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
        VLLM_LOGGING_LEVEL="INFO",
        # vLLM gives each rank a NUMA node of its own; small machines have one.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    return {**json.loads(job.read_text()), "log": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def expected(_engines):
    """Plain vLLM's output tokens on one rank."""
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )
    some = [{"prompt_token_ids": tokens} for tokens in chosen_prompts()]
    return [list(o.outputs[0].token_ids) for o in generate(_engines(), some, params)]


def test_output_is_that_of_one_rank(expected, run):
    wrong = {
        fault_of(len(prompt))
        for prompt, left, right in zip(chosen_prompts(), expected, run["outputs"], strict=True)
        if left != right
    }
    assert wrong == set()


def test_beam_searches_are_those_of_the_oracle(run):
    """Next to ordinary requests with drafts; the program compares them."""
    assert run["hypotheses"] == sum(case.beam_width for case in few_cases())


def test_drafts_were_accepted(run):
    counters = run["counters"]
    assert counters["vllm:trie_tokens"] > 1.1 * counters["vllm:trie_steps"]
    assert counters["vllm:trie_draft_nodes"] > counters["vllm:trie_verified_trees"]


def test_faults_happened_on_both_ranks(run):
    """Else the comparison above would say little."""
    for rank in (0, 1):
        assert f"a fault of rank {rank}" in run["log"]
    # The counter is rank 0's: its two requests.
    assert run["counters"]["vllm:trie_draft_failures"] == 2
