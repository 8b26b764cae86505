"""Drafts on vLLM's Model Runner V2 against the same runner without speculation, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object. With a number, it
compares only that many random requests with trees; the tests send few.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
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
from tests.engine.test_random_requests import run as answers_of
from tests.engine.v2_trees import differing, differing_walks, random_requests, tell_oracle_of
from vllm_trie.drafters import DraftRequest
from vllm_trie.tiny_model import model_path
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE, TreeStats

TOKENS = 4
NODES = 6
RANDOM_REQUESTS = 8
LONG = 10
"""Output tokens of most requests. The interpreter needs tens of milliseconds for each."""
OPT_OUT = {"extra_args": {"speculation": False}}
LENGTHS = (110, 7, 64, 33, 90, 15)
TEXTS = [
    {"prompt_token_ids": each["prompt_token_ids"][:length]}
    for each, length in zip(prompts(len(LENGTHS)), LENGTHS, strict=True)
]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": LONG, "detokenize": False, **options}
    )


MIXED = [greedy(max_tokens=6 + 2 * i, **(OPT_OUT if i % 3 == 1 else {})) for i in range(6)]
SEEDS = [greedy(temperature=0.9, seed=i, top_p=0.95, max_tokens=5) for i in range(4)]
SEEDS_WITHOUT_DRAFTS = [
    greedy(temperature=0.9, seed=i, top_p=0.95, max_tokens=5, **(OPT_OUT if i < 3 else {}))
    for i in range(4)
]
CHAINS = {"method": "ngram_trie", "num_speculative_tokens": TOKENS}
TREES = {"method": "ngram_trie", "num_speculative_tokens": NODES, "verification": "tree"}
STRUCTURED = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})


def engine(**options: Any) -> LLM:
    options = {"block_size": 32, "num_gpu_blocks_override": 8, "max_num_seqs": 3, **options}
    return LLM(
        model=str(model_path()),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=160,  # blocks for two requests, and vLLM keeps one
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
        on_host = bool(args) and any(args[0] is each for each in self.kept_on_host)
        HostReads.count += getattr(func, "__name__", "") in self.names and not on_host
        return func(*args, **(kwargs or {}))

    def __init__(self, *kept_on_host: torch.Tensor) -> None:
        super().__init__()
        self.kept_on_host = kept_on_host


def count_waits(llm: LLM, waits: list[int]) -> None:
    """Note, for each step, how often verification and drafting wait for the device."""
    runner = runner_of(llm)
    propose, verify = runner.adapter.propose, runner.rejection_sampler
    verified = [0]

    def counting_verify(logits: Any, batch: Any, *args: Any) -> Any:
        before = HostReads.count
        with HostReads(batch.seq_lens_cpu_upper_bound):
            output = verify(logits, batch, *args)
        verified[0] = HostReads.count - before
        return output

    def counting_propose(*args: Any) -> torch.Tensor:
        before = v2_on_cpu.Event.waits + HostReads.count
        with HostReads():
            drafts = propose(*args)
        waits.append(v2_on_cpu.Event.waits + HostReads.count - before + verified.pop())
        verified.append(0)
        return drafts

    runner.adapter.propose = counting_propose
    runner.rejection_sampler = counting_verify


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
    seeded = generate(llm, TEXTS[:4], SEEDS_WITHOUT_DRAFTS)
    result["seeds"] = differences(plain["seeds"][:3], seeded[:3])
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


def run_trees(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """The share of an engine with trees, most of them with a part of the true continuation."""
    before = free_blocks(llm)
    waits: list[int] = []
    count_waits(llm, waits)
    totals = trees_of(llm).totals
    put_in(llm, OracleDrafter)
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, MIXED)
    result: dict[str, Any] = {
        "async": type(scheduler_of(llm)).__name__.startswith("Async"),
        "greedy": differences(plain["greedy"], outputs),
        "preempted": len(preempted),
        "greedy_steps": [totals.steps, totals.tokens],
    }
    if result["async"]:
        tell_oracle(plain["seeds"])
        steps, tokens = totals.steps, totals.tokens
        result["seeds"] = differences(plain["seeds"], generate(llm, TEXTS[:4], SEEDS))
        result["seeds_steps"] = [totals.steps - steps, totals.tokens - tokens]
        tell_oracle(plain["long"])
        result["structured"] = differences(plain["structured"], structured(llm))
        check_outputs_beside_aborts(llm, plain["long"], greedy(), {2: [0], 5: [3]})
        tell_oracle_of(plain["requests"], plain["answers"])
        found = answers_of(llm, plain["requests"], with_priorities=False)
        result["random"] = differing(plain["requests"], plain["answers"], found)
    result["waits"] = [min(waits), max(waits), len(waits)]
    if result["async"]:
        HiddenStateDrafter.steps.clear()
        plain["seen"] = hidden_states(llm, OracleDrafter.answers)
        result["argmax"] = [
            bool(step.node_argmax[step.accepted[-1] + 1 if step.accepted else 0] == tokens[-1])
            for tokens, step in HiddenStateDrafter.steps
            if step is not None and step.tree.num_nodes
        ]
    for _ in range(3):  # let the worker hear of the last ones
        if scheduler_of(llm).has_requests():
            llm.llm_engine.step()
    result["requests_left"] = len(runner_of(llm).adapter._requests)
    result["blocks_lost"] = before - free_blocks(llm)
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
    seen_in_trees = plain["seen"].keys() & seen[1].keys()
    errors += [(plain["seen"][t] - seen[1][t]).abs().max().item() for t in seen_in_trees]
    result["hidden_states_error"] = max(errors)
    return result


def structured(llm: LLM) -> list[Any]:
    params = greedy(structured_outputs=STRUCTURED, max_tokens=6)
    return generate(llm, TEXTS[1:3], [params, greedy()])


def beside_a_beam_search(llm: LLM) -> list[Any]:
    beams, params = request_of(Case(tuple(TEXTS[3]["prompt_token_ids"]), 2, False, 1.0, 5))
    return generate(llm, [TEXTS[0], beams, TEXTS[5]], [greedy(), params, greedy()])


def use_v2(value: bool) -> None:
    # Where an engine has run, vLLM reads no environment variable any more.
    vars(envs)["VLLM_USE_V2_MODEL_RUNNER"] = value


def compare_random_requests(count: int) -> dict[str, Any]:
    """Many random requests with trees, in engines of their own."""
    room = {"max_num_seqs": 8, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 96}
    requests = random_requests(count, seed=1)
    expected = answers_of(engine(**room), requests, with_priorities=False)
    tell_oracle_of(requests, expected)
    llm = engine(speculative_config=TREES, **room)
    put_in(llm, OracleDrafter)
    with preemptions(llm) as preempted:
        found = answers_of(llm, requests, with_priorities=False)
    totals = trees_of(llm).totals
    return {
        "random": differing(requests, expected, found),
        "answered": len(found),
        "preempted": len(preempted),
        "steps": [totals.steps, totals.tokens],
    }


def compare_all() -> dict[str, Any]:
    use_v2(False)
    v1 = engine()
    assert not isinstance(runner_of(v1), GPUModelRunner)
    expected = generate(v1, TEXTS, greedy())
    use_v2(True)
    llm = engine(async_scheduling=False)
    requests = random_requests(RANDOM_REQUESTS, seed=0)
    plain = {
        "greedy": generate(llm, TEXTS, MIXED),
        "beams": beside_a_beam_search(llm),
        "seeds": generate(llm, TEXTS[:4], SEEDS),
        "long": generate(llm, TEXTS, greedy()),
        "structured": structured(llm),
        "requests": requests,
        "answers": answers_of(llm, requests, with_priorities=False),
    }
    tell_oracle(plain["long"])
    result: dict[str, Any] = {"v1": differences(expected, plain["long"])}
    synchronous, asynchronous = {"async_scheduling": False}, {}
    result["trees"] = run_trees(engine(speculative_config=TREES), plain)
    result["synchronous trees"] = run_trees(engine(speculative_config=TREES, **synchronous), plain)
    for name, options in {"synchronous": synchronous, "asynchronous": asynchronous}.items():
        result[name] = run(engine(speculative_config=CHAINS, **options), plain)
    return {**result, "walks": differing_walks(20)}


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    use_v2(True)
    result = compare_random_requests(int(sys.argv[1])) if sys.argv[1:] else compare_all()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
