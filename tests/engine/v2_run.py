"""Drafts on vLLM's Model Runner V2 against the same runner without speculation, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object. The tests send few
random requests; this compares only such, as many as are wanted, with one of `METHODS`:

    python -m tests.engine.v2_run COUNT [SEED [METHOD]]

And this only trained drafters with random weights, all or some, as chains and as trees:

    python -m tests.engine.v2_run trained [NAME ...]
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import torch
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.beam.cases import few_cases, request_of, run_cases
from tests.engine.beam.gpu_runners_run import passes_at_start
from tests.engine.beam.lora import make_adapters
from tests.engine.beam.oracle import Case
from tests.engine.compare import (
    check_outputs_beside_aborts,
    differences,
    generate,
    preemptions,
    session_answers,
    session_texts,
    step_to_the_end,
    tell_oracle,
)
from tests.engine.conftest import free_blocks, runner_of, scheduler_of, trees_of
from tests.engine.drafters import FaultyDrafter, HiddenStateDrafter, OracleDrafter
from tests.engine.launches import launches, new_launches, record_launches
from tests.engine.prompts import prompts
from tests.engine.test_random_requests import THINKING
from tests.engine.test_random_requests import run as answers_of
from tests.engine.v2_delivery import differing_deliveries
from tests.engine.v2_families import TESTED, compare_families
from tests.engine.v2_faults import ENGINE, FAULTS, reasons
from tests.engine.v2_neural import Comparison, compare_neural, compare_random, compare_union
from tests.engine.v2_replay import replay
from tests.engine.v2_trees import (
    differing,
    differing_top_tokens,
    differing_walks,
    put_in,
    random_requests,
    tell_oracle_of,
)
from tests.engine.v2_waits import Waits
from vllm_trie.drafts import DraftRequest
from vllm_trie.hooks.wire import STATS_ATTRIBUTE
from vllm_trie.lab.local_engine import decode_steps
from vllm_trie.lab.tiny_model import medusa_path, model_path
from vllm_trie.tree import TokenTree

TOKENS = 4
NODES = 6
RANDOM_REQUESTS = 8
LONG = 10
"""Output tokens of most requests. The interpreter needs tens of milliseconds for each."""
OPT_OUT = {"extra_args": {"speculation": False}}
LENGTHS = (110, 7, 64, 33, 90, 15)
TEXTS = [
    {"prompt_token_ids": prompt["prompt_token_ids"][:length]}
    for prompt, length in zip(prompts(len(LENGTHS)), LENGTHS, strict=True)
]

SESSIONS = [
    [text[:-2], text[-2:-1], text[-1:]]
    for text in (some["prompt_token_ids"] for some in (TEXTS[0], TEXTS[2]))
]
"""The parts of prompts."""


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": LONG, "detokenize": False, **options}
    )


WITHOUT_DRAFTS = {1: OPT_OUT, 3: {"thinking_token_budget": 2}}
MIXED = [greedy(max_tokens=6 + 2 * i, **WITHOUT_DRAFTS.get(i, {})) for i in range(6)]
SEEDS = [greedy(temperature=0.9, seed=i, top_p=0.95, max_tokens=5) for i in range(4)]
SEEDS[3].min_p, SEEDS[3].logit_bias = 0.02, {210: 3.0, 13: -2.0}  # exact with trees only
SEEDS_WITHOUT_DRAFTS = [
    greedy(temperature=0.9, seed=i, top_p=0.95, max_tokens=5, **(OPT_OUT if i < 3 else {}))
    for i in range(4)
]
UNION = {
    "method": "trie_union",
    "drafters": ["ngram", "medusa"],
    "model": str(medusa_path()),
}
LOOKAHEAD = {"method": "lookahead_trie", "ngram_size": 3}
HEADS = {"method": "medusa_dynamic", "model": str(medusa_path())}
# The interpreter's times say nothing of what a node is worth.
AS_CHAINS = {"num_speculative_tokens": TOKENS, "node_budget": "fixed"}
AS_TREES = {"num_speculative_tokens": NODES, "node_budget": "fixed", "verification": "tree"}
CHAINS = {"method": "ngram_trie", **AS_CHAINS, "launch_ahead": False}
AHEAD = {**CHAINS, "launch_ahead": True}
TREES = {"method": "ngram_trie", **AS_TREES}
NGRAM = {
    "method": "ngram_gpu",
    "num_speculative_tokens": TOKENS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
"""vLLM's own, which drafts on the device."""
METHODS = {
    "oracle": TREES,
    "ngram": {**TREES, "recycle": True},
    "medusa": {**HEADS, **AS_TREES},
    "lookahead": {**LOOKAHEAD, **AS_TREES},
    "union": {**UNION, **AS_TREES},
    "chains": CHAINS,
    "chains ahead": AHEAD,
    "medusa chains": {**HEADS, **AS_CHAINS},
    "lookahead chains": {**LOOKAHEAD, **AS_CHAINS},
    "union chains": {**UNION, **AS_CHAINS},
}
"""Of the runs with many random requests; `oracle` has most of the true path in its trees."""
ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
"""For two adapters: vLLM on CPUs computes requests without one with that of the last slot."""
STRUCTURED = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
STRUCTURED_FIRST = [greedy(structured_outputs=STRUCTURED, max_tokens=6), greedy()]


def engine(**options: Any) -> LLM:
    settings = {
        "model": str(model_path()),
        "block_size": 32,
        "num_gpu_blocks_override": 8,  # for two requests, and vLLM keeps one
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "max_model_len": 160,
        "dtype": "float32",
        "kv_cache_memory_bytes": 16 << 20,
        "reasoning_config": ReasoningConfig(**THINKING),
        **options,
    }
    return LLM(
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **settings,
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


def count_drafts(llm: LLM, drafts: list[int]) -> None:
    """Note the length of each draft that is verified."""
    trees = trees_of(llm)
    stock = trees.begin_step

    def begin_step(request_ids: Any, scheduled: Any, *others: Any) -> Any:
        drafts.extend(filter(None, map(len, scheduled.values())))
        return stock(request_ids, scheduled, *others)

    trees.begin_step = begin_step


def note_rows(llm: LLM) -> list[bool]:
    """Note whether drafts right after a prompt have the logits of its last token."""
    trees, had_rows = trees_of(llm), []
    stock = trees.draft

    def draft(step: Any, requests: dict[int, DraftRequest], *others: Any) -> Any:
        result = stock(step, requests, *others)
        had_rows.extend(
            request.rows is not None
            for request in requests.values()
            if len(request.token_ids) == request.num_prompt_tokens + 1
        )
        return result

    trees.draft = draft
    return had_rows


class Lengths:
    """Tokens of steps as scheduled and as verified, and of each draft.

    Attributes:
        scheduled, verified: tokens of each step with places for drafts.
        filled: draft tokens verified in excess of those drafted.
        undrafted: steps that verify drafts beside requests that have places and no draft.
    """

    def __init__(self, llm: LLM) -> None:
        self.scheduled: list[int] = []
        self.verified: list[int] = []
        self.filled = self.undrafted = 0
        adapter = runner_of(llm).adapter
        stock = adapter._cut

        def cut(output: Any, lengths: Any = None) -> Any:
            result = stock(output, lengths)
            if lengths is not None:  # launched ahead, with places that were planned
                return result
            step = result.output
            places = output.scheduled_spec_decode_tokens
            if places:
                self.scheduled.append(output.total_num_scheduled_tokens)
                self.verified.append(step.total_num_scheduled_tokens)
                drafted = {name: len(adapter._requests[name].drafted) for name in places}
                kept = {n: len(t) for n, t in step.scheduled_spec_decode_tokens.items()}
                self.filled += sum(kept.get(name, 0) - drafted[name] for name in places)
                alone = [n for n in places if not kept.get(n) and step.num_scheduled_tokens[n] == 1]
                self.undrafted += bool(alone) and bool(kept)
            return result

        adapter._cut = cut

    def summary(self) -> dict[str, float]:
        steps = len(self.scheduled)
        return {
            "scheduled": sum(self.scheduled) / steps,
            "verified": sum(self.verified) / steps,
            "filled": self.filled,
            "undrafted": self.undrafted,
        }


def steps_with_trees(llm: LLM) -> list[int]:
    """Steps of `decode_steps` with several tokens, and those of them whose tree has the tokens."""
    texts = [text["prompt_token_ids"] for text in TEXTS]
    batches = decode_steps(llm, texts, MIXED)
    steps = [step for batch in batches for step in batch if len(step.tokens) > 1]
    return [len(steps), sum(len(step.accepted) + 1 >= len(step.tokens) for step in steps)]


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
    drafts: list[int] = []
    waits, lengths = Waits(llm), Lengths(llm)
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
    result["lengths"] = lengths.summary()
    result["tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
    result["stats"] = dataclasses.asdict(totals)
    seeded = generate(llm, TEXTS[:4], SEEDS_WITHOUT_DRAFTS)
    result["seeds"] = differences(plain["seeds"][:3], seeded[:3])
    result["structured"] = differences(plain["structured"], structured(llm))
    result["sessions"] = sessions(llm, plain["stops"]) == plain["sessions"]
    result |= predicted(llm, plain["long"])
    put_in(llm, ChainOracle)
    steps, tokens = totals.steps, totals.tokens
    check_outputs_beside_aborts(llm, plain["long"], greedy(), {3: [0], 7: [3]})
    result["oracle_tokens_per_step"] = (totals.tokens - tokens) / (totals.steps - steps)
    result["waits"] = waits.summary()
    result |= run_other_drafters(llm, plain) if result["async"] else run_adapters(llm, plain)
    step_to_the_end(llm)
    result["requests_left"] = len(runner.adapter._requests) + len(runner.req_states.req_id_to_index)
    result["blocks_lost"] = before - free_blocks(llm)
    counters = {metric.name: metric for metric in llm.get_metrics()}
    result["counted_drafts"] = counters["vllm:spec_decode_num_draft_tokens"].value
    result["counted_trees"] = counters["vllm:trie_verified_trees"].value
    result["all_drafts"], result["all_trees"] = sum(drafts), len(drafts)
    result["num_failures"] = sum(trees_of(llm).guard.failures.values())
    # The last step's statistics wait for another step's output, or in the scheduler.
    waiting = (getattr(scheduler_of(llm), STATS_ATTRIBUTE, None), runner.adapter._stats)
    result["counted_tokens"] = counters["vllm:trie_tokens"].value + sum(
        stats.tokens for stats in waiting if stats is not None
    )
    result["all_tokens"] = totals.tokens
    return result


def run_ahead(llm: LLM, plain: dict[str, list[Any]]) -> dict[str, Any]:
    """The share of an engine whose steps are launched ahead of their drafts."""
    before, adapter, totals = free_blocks(llm), runner_of(llm).adapter, trees_of(llm).totals
    waits, ahead, stock = Waits(llm), [], adapter._plan
    early, guard = [], trees_of(llm).guard
    draft_prepared = guard.draft_prepared

    def plan(output: Any) -> Any:
        lengths = stock(output)
        if output.total_num_scheduled_tokens:  # none while a grammar is compiled
            ahead.append(lengths is not None)
        return lengths

    def draft_early(*arguments: Any) -> Any:
        early.append(draft_prepared(*arguments))
        return early[-1]

    adapter._plan, guard.draft_prepared = plan, draft_early
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, MIXED)
    result: dict[str, Any] = {
        "greedy": differences(plain["greedy"], outputs),
        "preempted": len(preempted),
        "structured": differences(plain["structured"], structured(llm)),
        **predicted(llm, plain["long"]),
    }
    put_in(llm, ChainOracle)
    steps, tokens = totals.steps, totals.tokens
    check_outputs_beside_aborts(llm, plain["long"], greedy(), {3: [0], 7: [3]})
    result["oracle_tokens_per_step"] = (totals.tokens - tokens) / (totals.steps - steps)
    result["steps_with_trees"] = steps_with_trees(llm)
    put_in(llm, FaultyDrafter)
    result["faulty"] = differences(plain["long"], generate(llm, TEXTS, greedy()))
    step_to_the_end(llm)
    return {
        **result,
        "ahead": [sum(ahead), len(ahead)],
        "early": [sum(chains is not None for chains in early), len(early)],
        "waits": waits.summary(),
        "requests_left": len(adapter._requests) + len(trees_of(llm).forecast._rates),
        "blocks_lost": before - free_blocks(llm),
    }


def run_trees(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """The share of an engine with trees; of the asynchronous one's, most have the true path."""
    before = free_blocks(llm)
    waits = Waits(llm)
    totals = trees_of(llm).totals
    is_async = type(scheduler_of(llm)).__name__.startswith("Async")
    if is_async:
        put_in(llm, OracleDrafter)
    had_rows = note_rows(llm)
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, MIXED)
    result: dict[str, Any] = {
        "async": is_async,
        "had_rows": had_rows,
        "greedy": differences(plain["greedy"], outputs),
        "preempted": len(preempted),
        "greedy_steps": [totals.steps, totals.tokens],
        "steps_with_trees": steps_with_trees(llm),
        "sessions": sessions(llm, plain["stops"]) == plain["sessions"],
    }
    if is_async:
        tell_oracle(plain["seeds"])
        steps, tokens = totals.steps, totals.tokens
        result["seeds"] = differences(plain["seeds"], generate(llm, TEXTS[:4], SEEDS))
        result["seeds_steps"] = [totals.steps - steps, totals.tokens - tokens]
        tell_oracle(plain["long"])
        result["structured"] = differences(plain["structured"], structured(llm))
        result |= predicted(llm, plain["long"])
        check_outputs_beside_aborts(llm, plain["long"], greedy(), {2: [0], 5: [3]})
        tell_oracle_of(plain["requests"], plain["answers"])
        answers = answers_of(llm, plain["requests"], with_priorities=False)
        result["random"] = differing(plain["requests"], plain["answers"], answers)
    result["waits"] = waits.summary()
    if not is_async:
        result |= run_adapters(llm, plain)
    else:
        HiddenStateDrafter.steps.clear()
        plain["seen"] = hidden_states(llm, OracleDrafter.answers)
        result["argmax"] = [
            bool(step.node_argmax[step.accepted[-1] + 1 if step.accepted else 0] == tokens[-1])
            for tokens, step in HiddenStateDrafter.steps
            if step is not None and step.tree.num_nodes
        ]
    step_to_the_end(llm)
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
    result["hidden_states"] = [len(texts) for texts in (*seen, common)]
    errors = [(seen[0][text] - seen[1][text]).abs().max().item() for text in common]
    seen_in_trees = plain["seen"].keys() & seen[1].keys()
    errors += [(plain["seen"][t] - seen[1][t]).abs().max().item() for t in seen_in_trees]
    result["hidden_states_error"] = max(errors)
    return result


def run_adapters(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Requests with LoRA adapters and cache salts, one of them a second time."""
    guard, salts = trees_of(llm).guard, {}
    stock = guard.propose

    def propose(requests: list[DraftRequest], *prepared: Any) -> list[TokenTree]:
        salts.update({request.request_id: request.cache_salt for request in requests})
        return stock(requests, *prepared)

    guard.propose = propose
    outputs = adapted(llm, plain["adapters"])
    guard.propose = stock
    return {
        "adapters": differences(plain["adapted"], outputs),
        "salts": sorted({str(salt) for salt in salts.values()}),
        "cached": [sum(o.num_cached_tokens for o in some) for some in (plain["adapted"], outputs)],
    }


def adapted(llm: LLM, adapters: list[LoRARequest]) -> list[Any]:
    first, second = adapters
    text = TEXTS[2]
    salted = {**text, "cache_salt": "mine"}
    prompts, chosen = [text, text, salted, text, salted], [first, second, None, first, second]
    return llm.generate(prompts, greedy(), lora_request=chosen, use_tqdm=False)


def structured(llm: LLM) -> list[Any]:
    return generate(llm, TEXTS[1:3], STRUCTURED_FIRST)


def neural_cases(plain: dict[str, Any]) -> list[Comparison]:
    return [
        (TEXTS[:4], greedy(), plain["long"][:4]),
        (TEXTS[:4], SEEDS, plain["seeds"]),
        (TEXTS[1:3], STRUCTURED_FIRST, plain["structured"]),
    ]


def sessions(llm: LLM, stops: list[int]) -> list[list[list[int]]]:
    """The answers to prompts that come in parts."""
    return session_answers(llm, SESSIONS, greedy(stop_token_ids=stops), waits=False)[0]


def predicted(llm: LLM, answers: list[Any]) -> dict[str, Any]:
    """Decode with the answers as predictions: what differs, and what was accepted of them."""
    tokens = [list(answer.outputs[0].token_ids) for answer in answers[:2]]
    params = [greedy(extra_args={"prediction": prediction}) for prediction in tokens]
    outputs = generate(llm, TEXTS[:2], params)
    accepted = [output.outputs[0].accepted_prediction_tokens for output in outputs]
    return {"predicted": differences(answers[:2], outputs), "accepted_predicted": sum(accepted)}


def beside_a_beam_search(llm: LLM) -> list[Any]:
    beams, params = request_of(Case(tuple(TEXTS[3]["prompt_token_ids"]), 2, False, 1.0, 5))
    return generate(llm, [TEXTS[0], beams, TEXTS[5]], [greedy(), params, greedy()])


def compare_random_requests(count: int, seed: int, method: str) -> dict[str, Any]:
    """Many random requests, in engines of their own."""
    room = {"max_num_seqs": 8, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 96}
    requests = random_requests(count, seed)
    expected = answers_of(engine(**room), requests, with_priorities=False)
    tell_oracle_of(requests, expected)
    llm = engine(speculative_config=METHODS[method], **room)
    if method == "oracle":
        put_in(llm, OracleDrafter)
    with preemptions(llm) as preempted:
        answers = answers_of(llm, requests, with_priorities=False)
    if "verification" not in METHODS[method]:
        # With chains a seed gives other tokens, and another text to structured outputs; listed
        # tokens have no logprobs.
        alike = {
            index
            for index, request in enumerate(requests)
            if request.params.temperature == 0.0 and not request.params.logprob_token_ids
        }
        expected = {i: a for i, a in expected.items() if i in alike}
        answers = {i: a for i, a in answers.items() if i in alike}
    totals = trees_of(llm).totals
    return {
        "method": method,
        "random": differing(requests, expected, answers),
        "compared": len(answers),
        "preempted": len(preempted),
        "steps": [totals.steps, totals.tokens],
    }


def check_faults() -> dict[str, Any]:
    """What the check at a start says, and kernels of verification that only serving launches."""
    # Fills memory that nothing has written: what reads it fails each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    record_launches()
    llm = engine(speculative_config=CHAINS, **ENGINE)
    said = reasons(llm, ["none"])
    before = set(launches)
    structured(llm)
    generate(llm, TEXTS, [greedy(), *MIXED[:3], *SEEDS_WITHOUT_DRAFTS[2:]])
    generate(llm, TEXTS[:1], greedy())
    new = new_launches(before, "vllm.v1.worker.gpu.spec_decode.")
    return {"reasons": {**reasons(llm, FAULTS), **said}, "new launches": new}


def replayed() -> dict[str, Any]:
    """Recorded text in bfloat16."""
    methods = {"chains": (CHAINS, ChainOracle), "trees": (TREES, OracleDrafter)}
    texts = [TEXTS[i]["prompt_token_ids"] for i in (0, 2, 3, 4)]
    with tempfile.TemporaryDirectory() as folder:
        return replay(engine, methods, texts, greedy(max_tokens=20), Path(folder))


def compare_all(folder: Path) -> dict[str, Any]:
    v2_on_cpu.use_v2(False)
    v1 = engine()
    assert not isinstance(runner_of(v1), GPUModelRunner)
    expected = generate(v1, TEXTS, greedy())
    v2_on_cpu.use_v2(True)
    llm = engine(async_scheduling=False, **ADAPTERS)
    waits = Waits(llm)
    requests = random_requests(RANDOM_REQUESTS, seed=0)
    adapters = make_adapters(folder, 2)
    plain = {
        "greedy": generate(llm, TEXTS, MIXED),
        "waits": waits.summary(),
        "beams": beside_a_beam_search(llm),
        "seeds": generate(llm, TEXTS[:4], SEEDS),
        "long": generate(llm, TEXTS, greedy()),
        "structured": structured(llm),
        "requests": requests,
        "answers": answers_of(llm, requests, with_priorities=False),
        "adapters": adapters,
        "adapted": adapted(llm, adapters),
    }
    plain["stops"] = [answers[0][4] for answers in sessions(llm, [])]
    plain["sessions"] = sessions(llm, plain["stops"])
    tell_oracle(plain["long"])
    # For drafts that go on behind a stop token.
    tell_oracle(generate(llm, session_texts(SESSIONS, plain["sessions"]), greedy()))
    result: dict[str, Any] = {"v1": differences(expected, plain["long"])}
    synchronous = {"async_scheduling": False, **ADAPTERS}
    result["trees"] = run_trees(engine(speculative_config=TREES), plain)
    union = {**UNION, **AS_TREES}
    result["synchronous trees"] = run_trees(engine(speculative_config=union, **synchronous), plain)
    union = {**UNION, **AS_CHAINS}
    result["synchronous"] = run(engine(speculative_config=union, **synchronous), plain)
    result["asynchronous"] = run(engine(speculative_config=CHAINS), plain)
    result["ahead"] = run_ahead(engine(speculative_config=AHEAD), plain)
    ngram = engine(speculative_config=NGRAM)
    waits = Waits(ngram)
    outputs = generate(ngram, TEXTS[:3], greedy())
    result["vllm"] = {
        "plain": plain["waits"],
        "ngram": waits.summary(),
        "differences": differences(plain["long"][:3], outputs),
    }
    result["families"] = compare_families(TESTED, LONG)
    result |= compare_neural(engine, neural_cases(plain))
    kernels = {
        "walks": differing_walks(20),
        "deliveries": differing_deliveries(20),
        "top tokens": differing_top_tokens(12),
    }
    return {**result, **kernels}


def compare_newer(folder: Path) -> dict[str, Any]:
    """What a release of vLLM can change below the plugin: steps, preemptions and verification,
    masks of grammars, adapters, searches on the device and the check of them."""
    kept = [engine(async_scheduling=False, **ADAPTERS)]  # to the end: see `v2_families._kept`
    llm, adapters = kept[0], make_adapters(folder, 2)
    plain = {
        "greedy": generate(llm, TEXTS, MIXED),
        "seeds": generate(llm, TEXTS[:4], SEEDS),
        "structured": structured(llm),
        "adapters": adapters,
        "adapted": adapted(llm, adapters),
    }
    tell_oracle([*plain["greedy"], *plain["seeds"]])
    requests = TEXTS[:4], greedy()
    long = generate(llm, *requests)
    result: dict[str, Any] = {"union": compare_union(engine, requests, long, folder)}
    cases = neural_cases({**plain, "long": long})
    result |= compare_random(engine, cases, folder, "eagle3", "lilicorr")
    for name, options in {
        "ahead": {"speculative_config": AHEAD, **ADAPTERS},
        "trees": {"speculative_config": TREES},
    }.items():
        llm, is_exact = engine(**options), name == "trees"
        kept.append(llm)
        before, totals = free_blocks(llm), trees_of(llm).totals
        if is_exact:
            put_in(llm, OracleDrafter)
        with preemptions(llm) as preempted:
            outputs = generate(llm, TEXTS, MIXED)
        seeds, count = (SEEDS, 4) if is_exact else (SEEDS_WITHOUT_DRAFTS, 3)
        seeded = generate(llm, TEXTS[:count], seeds[:count])
        result[name] = {
            "preempted": len(preempted),
            "greedy": differences(plain["greedy"], outputs),
            "seeds": differences(plain["seeds"][:count], seeded),
            "structured": differences(plain["structured"], structured(llm)),
            "steps": [totals.steps, totals.tokens],
        }
        if not is_exact:
            result[name] |= run_adapters(llm, plain)
        step_to_the_end(llm)
        result[name]["blocks_lost"] = before - free_blocks(llm)
    llm = engine(max_num_seqs=16, num_gpu_blocks_override=None)
    cases = few_cases(length=20, max_tokens=8)[:3]
    result["hypotheses"] = run_cases(llm, str(model_path()), cases)
    result["check"] = passes_at_start(llm)
    return result


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    v2_on_cpu.use_v2(True)
    if sys.argv[1:] == ["newer"]:
        with tempfile.TemporaryDirectory() as folder:
            result = compare_newer(Path(folder))
    elif sys.argv[1:2] == ["trained"]:
        llm = engine()
        plain = {"long": generate(llm, TEXTS[:4], greedy()), "structured": structured(llm)}
        plain["seeds"] = generate(llm, TEXTS[:4], SEEDS)
        with tempfile.TemporaryDirectory() as folder:
            result = compare_random(engine, neural_cases(plain), Path(folder), *sys.argv[2:])
    elif sys.argv[1:]:
        count, seed, method = [*sys.argv[1:], *("", "1", "oracle")[len(sys.argv) - 1 :]]
        result = compare_random_requests(int(count), int(seed), method)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = {**compare_all(Path(folder)), "replayed": replayed(), **check_faults()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
