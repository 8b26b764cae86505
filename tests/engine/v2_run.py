"""Drafts on vLLM's Model Runner V2 against the same runner without speculation, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object. This compares only
trained drafters with random weights, all or some, as chains and as trees:

    python -m tests.engine.v2_run trained [NAME ...]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
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

from tests.engine import test_multimodal
from tests.engine.beam.cases import few_cases, run_cases
from tests.engine.beam.gpu_runners_run import passes_at_start
from tests.engine.beam.lora import make_adapters
from tests.engine.compare import (
    check_outputs_beside_aborts,
    differences,
    draft_tokens,
    generate,
    margins,
    preemptions,
    session_answers,
    session_texts,
    step_to_the_end,
    tell_oracle,
)
from tests.engine.conftest import free_blocks
from tests.engine.drafters import FaultyDrafter, HiddenStateDrafter, OracleDrafter
from tests.engine.launches import launches, new_launches, record_launches
from tests.engine.prompts import prompts
from tests.engine.test_random_requests import THINKING
from tests.engine.test_random_requests import run as answers_of
from tests.engine.v2_delivery import differing_deliveries
from tests.engine.v2_families import TESTED, compare_families
from tests.engine.v2_faults import ENGINE, FAULTS, reasons
from tests.engine.v2_neural import Comparison, compare_neural, compare_random, compare_union
from tests.engine.v2_trees import (
    differing,
    differing_top_tokens,
    differing_walks,
    put_in,
    random_requests,
    tell_oracle_of,
)
from tests.engine.v2_waits import Waits
from tests.processes import ROOT
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.engine.config import verification
from vllm_trie.hooks.wire import STATS_ATTRIBUTE
from vllm_trie.lab.local_engine import decode_steps, runner_of, scheduler_of, verifier_of
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


MIXED = [greedy(max_tokens=6 + 2 * i, **(OPT_OUT if i == 1 else {})) for i in range(6)]
THINKING_BRIEFLY = [greedy(thinking_token_budget=budget) for budget in (18, 4, 20, 30)]
"""Each ends at the fifth or sixth token: the prompts begin to think."""
LISTED = {"logprob_token_ids": [29, 202, 300]}
LABELS = [greedy(), greedy(max_tokens=1, **LISTED), greedy(max_tokens=6, **LISTED)]
"""The second one ends with its prompt, of three chunks, next to drafts of the others."""
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
ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
"""For two adapters: vLLM on CPUs computes requests without one with that of the last slot."""
STRUCTURED = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
STRUCTURED_FIRST = [greedy(structured_outputs=STRUCTURED, max_tokens=6), greedy()]


def engine(**options: Any) -> LLM:
    settings = {
        "num_gpu_blocks_override": 8,  # for two requests, and vLLM keeps one
        "max_num_seqs": 3,
        "kv_cache_memory_bytes": 16 << 20,
        "reasoning_config": ReasoningConfig(**THINKING),
        **options,
    }
    return v2_on_cpu.start(**settings)


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
    verifier = verifier_of(llm)
    stock = verifier.take_drafts

    def take_drafts(step: Any, verified: Any) -> None:
        drafts.extend(filter(None, map(len, verified.values())))
        stock(step, verified)

    verifier.take_drafts = take_drafts


def note_rows(llm: LLM) -> list[bool]:
    """Note whether drafts right after a prompt have the logits of its last token, of drafters that
    read them."""
    verifier, had_rows = verifier_of(llm), []
    stock = verifier.draft

    def draft(step: Any, requests: dict[int, DraftRequest], *others: Any) -> Any:
        result = stock(step, requests, *others)
        had_rows.extend(
            request.rows is not None
            for request in requests.values()
            if len(request.token_ids) == request.num_prompt_tokens + 1
            and verifier.guard.drafter.needs_rows
        )
        return result

    verifier.draft = draft
    return had_rows


def note_lengths(llm: LLM) -> list[tuple[int, int]]:
    """Note tokens as scheduled and as verified, of each step with places for drafts that are known
    at its launch."""
    adapter, lengths = runner_of(llm).adapter, []
    stock = adapter._cut

    def cut(output: Any, planned: Any = None) -> Any:
        result = stock(output, planned)
        if planned is None and output.scheduled_spec_decode_tokens:
            verified = result.output.total_num_scheduled_tokens
            lengths.append((output.total_num_scheduled_tokens, verified))
        return result

    adapter._cut = cut
    return lengths


def steps_with_trees(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Steps of `decode_steps` with several tokens, and those of them whose tree has the tokens."""
    texts = [text["prompt_token_ids"] for text in TEXTS]
    batches = decode_steps(llm, texts, MIXED)
    steps = [step for batch in batches for step in batch if len(step.tokens) > 1]
    with_tree = sum(len(step.accepted) + 1 >= len(step.tokens) for step in steps)
    return {"steps_with_trees": [len(steps), with_tree]}


def hidden_states(llm: LLM, answers: dict[Any, Any]) -> dict[Any, Any]:
    """What a drafter sees of each text; with `answers`, it has drafts accepted."""
    put_in(llm, HiddenStateDrafter)
    HiddenStateDrafter.answers, kept = answers, HiddenStateDrafter.answers
    HiddenStateDrafter.seen.clear()
    generate(llm, TEXTS[:3], greedy())
    HiddenStateDrafter.answers = kept
    return dict(HiddenStateDrafter.seen)


def share(llm: LLM, plain: dict[str, Any], *more: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """One engine's share: what differs from plain outputs, and what was done.

    Args:
        llm: The engine, which has served nothing.
        plain: Plain outputs.
        more: What it does besides; they take engine and plain outputs.
    """
    before, drafts = free_blocks(llm), list[int]()
    runner, totals = runner_of(llm), verifier_of(llm).totals
    assert isinstance(runner, GPUModelRunner)
    vllm_config = llm.llm_engine.vllm_config
    is_exact = verification(vllm_config) == "tree"  # with seeds, too
    waits, lengths = Waits(llm), note_lengths(llm)
    count_drafts(llm, drafts)
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, MIXED)
    result: dict[str, Any] = {
        "async": type(scheduler_of(llm)).__name__.startswith("Async"),
        "dense_text": not hasattr(runner.req_states.all_token_ids, "_uva_buf"),
        "greedy": differences(plain["greedy"], outputs),
        "preempted": len(preempted),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "steps": [totals.steps, totals.tokens],
        "lengths": lengths[:],
    }
    tell_oracle(plain["seeds"])
    params, count = (SEEDS, 4) if is_exact else (SEEDS_WITHOUT_DRAFTS, 3)
    seeded = generate(llm, TEXTS[:4], params)
    result["seeds"] = differences(plain["seeds"][:count], seeded[:count])
    tell_oracle([*plain["long"], *plain["told"]])
    result["structured"] = differences(plain["structured"], structured(llm))
    result["sessions"] = sessions(llm, plain["stops"]) == plain["sessions"]
    result |= predicted(llm, plain["long"])
    if vllm_config.lora_config is not None:
        result |= run_adapters(llm, plain)
    put_in(llm, OracleDrafter if is_exact else ChainOracle)
    result |= thoughts(llm, plain)
    steps, tokens = totals.steps, totals.tokens
    aborts = {2: [0], 5: [3]} if is_exact else {3: [0], 7: [3]}
    check_outputs_beside_aborts(llm, plain["long"], greedy(), aborts)
    result["oracle_tokens_per_step"] = (totals.tokens - tokens) / (totals.steps - steps)
    result["waits"] = waits.summary()  # without logprobs, which vLLM copies to no host on a CPU
    result["labels"] = label_errors(plain["labels"], labels(llm))
    for run in more:
        result |= run(llm, plain)
    step_to_the_end(llm)
    result["requests_left"] = len(runner.adapter._requests) + len(runner.req_states.req_id_to_index)
    result["blocks_lost"] = before - free_blocks(llm)
    counters = {metric.name: metric for metric in llm.get_metrics()}
    result["counted_drafts"] = counters["vllm:spec_decode_num_draft_tokens"].value
    result["counted_trees"] = counters["vllm:trie_verified_trees"].value
    result["all_drafts"], result["all_trees"] = sum(drafts), len(drafts)
    result["num_failures"] = sum(verifier_of(llm).guard.failures.values())
    # The last step's statistics wait for another step's output, or in the scheduler.
    waiting = (getattr(scheduler_of(llm), STATS_ATTRIBUTE, None), runner.adapter._stats)
    result["counted_tokens"] = counters["vllm:trie_tokens"].value + sum(
        stats.tokens for stats in waiting if stats is not None
    )
    result["all_tokens"] = totals.tokens
    return result


def share_ahead(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """The share of an engine whose steps are launched ahead of their drafts."""
    adapter, guard = runner_of(llm).adapter, verifier_of(llm).guard
    ahead, early, stock, draft_prepared = [], [], adapter._plan, guard.draft_prepared

    def plan(output: Any) -> Any:
        lengths = stock(output)
        if output.total_num_scheduled_tokens:  # none while a grammar is compiled
            ahead.append(lengths is not None)
        return lengths

    def draft_early(*arguments: Any) -> Any:
        early.append(draft_prepared(*arguments))
        return early[-1]

    adapter._plan, guard.draft_prepared = plan, draft_early
    result = share(llm, plain, steps_with_trees, faulty)
    assert not verifier_of(llm).forecast._rates
    result["ahead"] = [sum(ahead), len(ahead)]
    result["early"] = [sum(chains is not None for chains in early), len(early)]
    return result


def share_of_trees(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """The share of an engine whose trees have most of the true path."""
    put_in(llm, OracleDrafter)
    return share(llm, plain, steps_with_trees, random_answers, argmax_of_nodes)


def random_answers(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Random requests, with log-probabilities; and the waits of their steps."""
    waits = Waits(llm)
    tell_oracle_of(plain["requests"], plain["answers"])
    answers = answers_of(llm, plain["requests"], with_priorities=False)
    random_ones = differing(plain["requests"], plain["answers"], answers)
    return {"random": random_ones, "random_waits": waits.summary()}


def argmax_of_nodes(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Whether drafters get the argmax of each accepted node; leave what they see of each text."""
    HiddenStateDrafter.steps.clear()
    plain["seen"] = hidden_states(llm, OracleDrafter.answers)
    argmax = [
        bool(step.node_argmax[step.accepted[-1] + 1 if step.accepted else 0] == tokens[-1])
        for tokens, step in HiddenStateDrafter.steps
        if step is not None and step.tree.num_nodes
    ]
    return {"argmax": argmax}


def faulty(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    put_in(llm, FaultyDrafter)
    outputs = generate(llm, TEXTS, greedy())
    failures = verifier_of(llm).totals.draft_failures
    return {"faulty": differences(plain["long"], outputs), "failures": failures}


def hidden_states_of_chains(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """What drafters see of texts with accepted drafts, of chains and of trees, and without."""
    seen = hidden_states(llm, OracleDrafter.answers), hidden_states(llm, {})
    common = seen[0].keys() & seen[1].keys()
    errors = [(seen[0][text] - seen[1][text]).abs().max().item() for text in common]
    seen_in_trees = plain["seen"].keys() & seen[1].keys()
    errors += [(plain["seen"][t] - seen[1][t]).abs().max().item() for t in seen_in_trees]
    return {
        "hidden_states": [len(texts) for texts in (*seen, common)],
        "hidden_states_error": max(errors),
    }


def run_adapters(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Requests with LoRA adapters and cache salts, one of them a second time."""
    guard, salts = verifier_of(llm).guard, {}
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


def thoughts(llm: LLM, plain: dict[str, Any]) -> dict[str, Any]:
    """Decode with thinking budgets that end inside of drafts: what differs, and what of the drafts
    was accepted."""
    tell_oracle(plain["thoughts"])
    before = draft_tokens(llm)[0]
    outputs = generate(llm, TEXTS[:4], THINKING_BRIEFLY)
    accepted = draft_tokens(llm)[0] - before
    tell_oracle([*plain["long"], *plain["told"]])
    return {"thoughts": differences(plain["thoughts"], outputs), "accepted_thoughts": accepted}


def labels(llm: LLM) -> list[dict[int, float]]:
    """The log-probabilities of listed tokens, behind each output token."""
    outputs = generate(llm, [TEXTS[1], TEXTS[0], TEXTS[5]], LABELS)
    return [
        {token: logprob.logprob for token, logprob in of_token.items()}
        for output in outputs[1:]
        for of_token in output.outputs[0].logprobs or []
    ]


def label_errors(expected: list[dict[int, float]], found: list[dict[int, float]]) -> list[float]:
    """The largest difference behind each token; an error if some are missing."""
    pairs = zip(expected, found, strict=True)
    assert all({29, 202, 300} <= of_token.keys() for of_token in found)
    return [max(abs(b[token] - a[token]) for token in a) for a, b in pairs]


def predicted(llm: LLM, answers: list[Any]) -> dict[str, Any]:
    """Decode with the answers as predictions: what differs, and what was accepted of them."""
    tokens = [list(answer.outputs[0].token_ids) for answer in answers[:2]]
    params = [greedy(extra_args={"prediction": prediction}) for prediction in tokens]
    outputs = generate(llm, TEXTS[:2], params)
    accepted = [output.outputs[0].accepted_prediction_tokens for output in outputs]
    return {"predicted": differences(answers[:2], outputs), "accepted_predicted": sum(accepted)}


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


def low_precision() -> dict[str, Any]:
    """Trees in bfloat16, which round otherwise than steps without drafts."""
    llm = engine(speculative_config=TREES, dtype="bfloat16")
    params = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    expected = generate(llm, TEXTS, greedy(**params, **OPT_OUT))
    tell_oracle(expected)
    put_in(llm, OracleDrafter)
    totals = verifier_of(llm).totals
    steps, tokens = totals.steps, totals.tokens
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, greedy(**params))
    return {
        "margins": margins(expected, outputs),
        "preempted": len(preempted),
        "steps": [totals.steps - steps, totals.tokens - tokens],
    }


def plain_outputs(llm: LLM, folder: Path) -> dict[str, Any]:
    """What engines' shares are compared with, which the oracles know then."""
    adapters, waits = make_adapters(folder, 2), Waits(llm)
    plain = {
        "greedy": generate(llm, TEXTS, MIXED),
        "waits": waits.summary(),
        "seeds": generate(llm, TEXTS[:4], SEEDS),
        "long": generate(llm, TEXTS, greedy()),
        "thoughts": generate(llm, TEXTS[:4], THINKING_BRIEFLY),
        "labels": labels(llm),
        "structured": structured(llm),
        "adapters": adapters,
        "adapted": adapted(llm, adapters),
    }
    differing = differences(plain["long"][:4], plain["thoughts"])
    assert len(differing) == 4, "each budget must end some thinking"
    plain["stops"] = [answers[0][4] for answers in sessions(llm, [])]
    plain["sessions"] = sessions(llm, plain["stops"])
    # For drafts that go on behind a stop token.
    plain["told"] = generate(llm, session_texts(SESSIONS, plain["sessions"]), greedy())
    tell_oracle([*plain["long"], *plain["told"]])
    return plain


def compare_all(folder: Path) -> dict[str, Any]:
    llm = engine(async_scheduling=False, **ADAPTERS)
    plain = plain_outputs(llm, folder)
    plain["requests"] = random_requests(RANDOM_REQUESTS, seed=0)
    plain["answers"] = answers_of(llm, plain["requests"], with_priorities=False)
    synchronous = {"async_scheduling": False, **ADAPTERS}
    result = {"trees": share_of_trees(engine(speculative_config=TREES), plain)}
    llm = engine(speculative_config={**UNION, **AS_TREES}, **synchronous)
    had_rows = note_rows(llm)
    result["synchronous trees"] = share(llm, plain, steps_with_trees) | {"had_rows": had_rows}
    union = {**UNION, **AS_CHAINS}
    result["synchronous"] = share(engine(speculative_config=union, **synchronous), plain)
    chains = engine(speculative_config=CHAINS)
    result["asynchronous"] = share(chains, plain, faulty, hidden_states_of_chains)
    result["ahead"] = share_ahead(engine(speculative_config=AHEAD), plain)
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
    return {**result, **kernels, "replayed": replayed()}


def note_prepared(guard: Any) -> list[bool]:
    """Note whether drafts were prepared, each time that they might be."""
    stock, were_prepared = guard.prepare, []

    def prepare(*args: Any) -> Any:
        prepared = stock(*args)
        were_prepared.append(prepared is not None)
        return prepared

    guard.prepare = prepare
    return were_prepared


def replayed() -> list[float]:
    """Let the benchmarks' replay model give recorded answers; return its tokens per step, with
    drafts that are prepared and without."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import peers
    from support import peers_engines

    texts = [[*text["prompt_token_ids"][:12]] for text in TEXTS[:3]]
    questions = [peers_engines.Question("any", text, text * 3, 20) for text in texts]
    load = peers.together(questions, 2)
    with peers_engines.replaying("tiny", 32_000) as model:
        settings = {"max_model_len": 160, "max_num_seqs": 2, "block_size": 32}
        settings |= {"enforce_eager": True, **peers_engines.replay_settings("bfloat16")}
        peers_engines.METHODS["prepared"] = {**AHEAD, "recycle": False}
        peers_engines.METHODS["unprepared"] = {**AHEAD, "recycle": False, "prepare": False}
        names = "prepared", "unprepared"
        contestants = [peers_engines.Contestant(name, model, **settings) for name in names]
        prepared = [note_prepared(verifier_of(contestant.llm).guard) for contestant in contestants]
        peers.play_answers(load)
        measured = [*peers_engines.answer(contestants, load)]
    v2_on_cpu.kept.append(contestants)
    assert all(some.output == load.answer for some in measured)
    assert [any(drafts) for drafts in prepared] == [True, False]
    return [(len(some.output) - some.requests) / some.steps for some in measured]


def compare_image_searches(folder: Path) -> int:
    """Compare searches with an image in the prompt with those of Transformers; their number."""
    family = test_multimodal.FAMILIES["positions in three dimensions"]
    torch.manual_seed(0)
    family.write(folder)
    prompts = test_multimodal.prompts(family)[:2]
    llm = engine(model=str(folder), num_gpu_blocks_override=None, max_num_seqs=8)
    width, length = test_multimodal.WIDTH, test_multimodal.NUM_SEARCHED
    search = greedy(n=width, max_tokens=length, extra_args={"beam_width": width})
    hypotheses = [test_multimodal.searched_by_transformers(str(folder), text) for text in prompts]
    test_multimodal.check(generate(llm, prompts, search), hypotheses)
    return len(prompts)


def compare_newer(folder: Path) -> dict[str, Any]:
    """What a release of vLLM can change below the plugin: steps, preemptions and verification,
    masks of grammars, adapters, searches on the device and the check of them."""
    plain = plain_outputs(engine(async_scheduling=False, **ADAPTERS), folder)
    requests, long = (TEXTS[:4], greedy()), plain["long"][:4]
    result: dict[str, Any] = {"union": compare_union(engine, requests, long, folder)}
    result |= compare_random(engine, neural_cases(plain), folder, "eagle3", "lilicorr")
    result["ahead"] = share(engine(speculative_config=AHEAD, **ADAPTERS), plain)
    llm = engine(speculative_config=TREES)
    put_in(llm, OracleDrafter)
    result["trees"] = share(llm, plain)
    llm = engine(max_num_seqs=16, num_gpu_blocks_override=None)
    cases = few_cases(length=20, max_tokens=8)[:3]
    result["hypotheses"] = run_cases(llm, str(model_path()), cases)
    result["check"] = passes_at_start(llm)
    result["image searches"] = compare_image_searches(folder / "images")
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
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = {**compare_all(Path(folder)), "bfloat16": low_precision(), **check_faults()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
