"""Chains on vLLM's Model Runner V2 against the same runner without speculation, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import torch
from torch.overrides import TorchFunctionMode
from vllm import LLM, SamplingParams, envs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.beam.cases import request_of
from tests.engine.beam.oracle import Case
from tests.engine.compare import (
    check_outputs_beside_aborts,
    differences,
    generate,
    preemptions,
    tell_oracle,
)
from tests.engine.conftest import free_blocks, runner_of, scheduler_of, trees_of
from tests.engine.drafters import FaultyDrafter, HiddenStateDrafter, NoOptions, OracleDrafter
from tests.engine.prompts import prompts
from vllm_trie.drafters import DraftRequest
from vllm_trie.tiny_model import model_path
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE, TreeStats

TOKENS = 4
OPT_OUT = {"extra_args": {"speculation": False}}
LENGTHS = (110, 7, 64, 33, 90, 15)
TEXTS = [
    {"prompt_token_ids": each["prompt_token_ids"][:length]}
    for each, length in zip(prompts(len(LENGTHS)), LENGTHS, strict=True)
]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 14, "detokenize": False, **options})


MIXED = [greedy(max_tokens=10 + 3 * i, **(OPT_OUT if i % 3 == 1 else {})) for i in range(6)]
SAMPLED = [greedy(temperature=0.9, seed=i, max_tokens=7, **OPT_OUT) for i in range(4)]
SAMPLED += [greedy(temperature=0.9, seed=i, max_tokens=7) for i in range(4, 6)]
STRUCTURED = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})


def engine(**options: Any) -> LLM:
    return LLM(
        model=str(model_path()),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        num_gpu_blocks_override=8,  # for two requests, and vLLM keeps one
        block_size=32,
        max_model_len=160,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        disable_log_stats=False,
        seed=0,
        **options,
    )


class ChainOracle(OracleDrafter):
    """Chains of random length that begin with a random part of the true continuation."""

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        rng = random.Random(hash(tuple(tokens)))
        prompt = tuple(tokens[: request.num_prompt_tokens])
        truth = self.answers.get(prompt, [])[len(tokens) - len(prompt) :]
        length = rng.randint(0, min(request.max_nodes, request.max_depth))
        path = truth[: rng.randint(0, length)]
        path += [rng.randrange(self.context.vocab_size) for _ in range(length - len(path))]
        return TokenTree.from_paths([path], length)


class HostReads(TorchFunctionMode):
    """Counts reads of tensors that would wait for a device."""

    names = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"})
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HostReads.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


def count_waits(llm: LLM, waits: list[int]) -> None:
    """Note, for each step, how often drafting waits for the device."""
    adapter = runner_of(llm).adapter
    stock = adapter.propose

    def propose(*args: Any) -> torch.Tensor:
        before = v2_on_cpu.Event.waits + HostReads.count
        with HostReads():
            drafts = stock(*args)
        waits.append(v2_on_cpu.Event.waits + HostReads.count - before)
        return drafts

    adapter.propose = propose


def count_drafts(llm: LLM, drafts: list[int]) -> None:
    """Note how many drafted tokens each step verifies."""
    trees = trees_of(llm)
    stock = trees.begin_step

    def begin_step(request_ids: Any, scheduled: Any, num_tokens: int) -> None:
        drafts.append(sum(map(len, scheduled.values())))
        stock(request_ids, scheduled, num_tokens)

    trees.begin_step = begin_step


def put_in(llm: LLM, drafter: type) -> None:
    guard = trees_of(llm).guard
    guard.drafter = drafter(NoOptions(), guard.drafter.context)


def hidden_states(llm: LLM, answers: dict[Any, Any]) -> dict[Any, Any]:
    """What a drafter sees of each text; with `answers`, it has drafts accepted."""
    put_in(llm, HiddenStateDrafter)
    HiddenStateDrafter.answers, kept = answers, HiddenStateDrafter.answers
    HiddenStateDrafter.seen.clear()
    generate(llm, TEXTS[:3], greedy())
    HiddenStateDrafter.answers = kept
    return dict(HiddenStateDrafter.seen)


def run(llm: LLM, plain: dict[str, list[Any]]) -> dict[str, Any]:
    """One engine's share: what differs from plain outputs, and what was done."""
    before = free_blocks(llm)
    waits: list[int] = []
    drafts: list[int] = []
    count_waits(llm, waits)
    count_drafts(llm, drafts)
    runner, totals = runner_of(llm), trees_of(llm).totals
    assert isinstance(runner, GPUModelRunner)
    result: dict[str, Any] = {
        "async": type(scheduler_of(llm)).__name__.startswith("Async"),
        "dense_text": not hasattr(runner.req_states.all_token_ids, "_uva_buf"),
    }
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, MIXED)
    result["greedy"] = differences(plain["greedy"], outputs)
    result["preempted"] = len(preempted)
    result["tokens"] = sum(len(each.outputs[0].token_ids) for each in outputs)
    result["stats"] = dataclasses.asdict(totals)
    seeded = generate(llm, TEXTS, SAMPLED)
    result["seeds"] = differences(plain["seeds"][:4], seeded[:4])
    result["structured"] = differences(plain["structured"], structured(llm))
    put_in(llm, ChainOracle)
    steps, tokens = totals.steps, totals.tokens
    check_outputs_beside_aborts(llm, plain["long"], greedy(), {3: [0], 7: [3]})
    result["oracle_tokens_per_step"] = (totals.tokens - tokens) / (totals.steps - steps)
    if result["async"]:
        result |= run_other_drafters(llm, plain)
    result["waits"] = [min(waits), max(waits), len(waits)]
    for _ in range(3):  # let the worker hear of the last ones
        if scheduler_of(llm).has_requests():
            llm.llm_engine.step()
    result["requests_left"] = len(runner.adapter._requests) + len(runner.req_states.req_id_to_index)
    result["blocks_lost"] = before - free_blocks(llm)
    counters = {metric.name: metric for metric in llm.get_metrics()}
    result["counted_drafts"] = counters["vllm:spec_decode_num_draft_tokens"].value
    result["all_drafts"] = sum(drafts)
    pending = getattr(scheduler_of(llm), STATS_ATTRIBUTE, None) or TreeStats()
    result["counted_tokens"] = counters["vllm:trie_tokens"].value + pending.tokens
    result["all_tokens"] = totals.tokens
    return result


def run_other_drafters(llm: LLM, plain: dict[str, list[Any]]) -> dict[str, Any]:
    """What does not depend on how steps are scheduled; with one engine it is enough."""
    result: dict[str, Any] = {"beams": differences(plain["beams"], beside_a_beam_search(llm))}
    put_in(llm, FaultyDrafter)
    result["faulty"] = differences(plain["long"], generate(llm, TEXTS, greedy()))
    result["failures"] = trees_of(llm).totals.draft_failures
    seen = hidden_states(llm, OracleDrafter.answers), hidden_states(llm, {})
    common = seen[0].keys() & seen[1].keys()
    result["hidden_states"] = [len(each) for each in (*seen, common)]
    errors = [(seen[0][text] - seen[1][text]).abs().max().item() for text in common]
    result["hidden_states_error"] = max(errors)
    return result


def structured(llm: LLM) -> list[Any]:
    params = greedy(structured_outputs=STRUCTURED, max_tokens=6)
    return generate(llm, TEXTS[1:3], [params, greedy()])


def beside_a_beam_search(llm: LLM) -> list[Any]:
    beams, params = request_of(Case(tuple(TEXTS[3]["prompt_token_ids"]), 2, False, 1.0, 5))
    return generate(llm, [TEXTS[0], beams, TEXTS[5]], [greedy(), params, greedy()])


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    # Where an engine has run, vLLM reads no environment variable any more.
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = False
    v1 = engine()
    assert not isinstance(runner_of(v1), GPUModelRunner)
    expected = generate(v1, TEXTS, greedy())
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = True
    llm = engine(async_scheduling=False)
    plain = {
        "greedy": generate(llm, TEXTS, MIXED),
        "beams": beside_a_beam_search(llm),
        "seeds": generate(llm, TEXTS, SAMPLED),
        "long": generate(llm, TEXTS, greedy()),
        "structured": structured(llm),
    }
    tell_oracle(plain["long"])
    method = {"method": "ngram_trie", "num_speculative_tokens": TOKENS}
    result: dict[str, Any] = {"v1": differences(expected, plain["long"])}
    for name, options in {"synchronous": {"async_scheduling": False}, "asynchronous": {}}.items():
        result[name] = run(engine(speculative_config=method, **options), plain)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
