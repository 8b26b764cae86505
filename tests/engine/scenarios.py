"""Requests of all kinds and the engines that they meet in, for :mod:`tests.engine.record`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

from tests.engine.beam import test_token_rules
from tests.engine.beam.cases import few_cases, greedy_requests, prompt, request_of
from tests.engine.beam.lora import make_adapters
from tests.engine.beam.test_little_room import cases
from tests.engine.compare import speculation
from tests.engine.conftest import Engines, scheduler_of, trees_of
from tests.engine.prompts import prompts, texts, tokenizer
from tests.engine.test_random_requests import HEADS, THINKING, random_request
from tests.extras.items.unit.catalogues import random_items, write
from vllm_trie.extras.corpus.corpus_file import write_corpus
from vllm_trie.extras.memory.store_file import read_store
from vllm_trie.extras.traces.trace_file import read_trace
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer
from vllm_trie.lab.tiny_model import model_path

TOGETHER, STEPS = 8, 6
"""Requests that arrive together, and steps between two arrivals."""
WIDE = {"max_model_len": 512, "max_num_seqs": 64, "block_size": 32}
SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True}, {"temperature": 0.8, "seed": 7}),
    ({"do_sample": True}, {"temperature": 0.8, "seed": 8, "top_k": 9, "top_p": 0.9}),
    ({"num_beam_groups": 2, "diversity_penalty": 0.7}, {}),
    ({"beam_trace": True}, {"logprobs": 3}),
    ({"early_stopping": True, "prediction": [5, 6, 7]}, {"stop": ["return", "\n\n"]}),
    ({"no_repeat_ngram_size": 3}, {"bad_words": ["self", "def"], "min_tokens": 4}),
]
"""Options of searches, and their sampling parameters."""
ITEMS: list[tuple[str, int, dict[str, Any]]] = [
    ("equal", 4, {}),
    ("equal", 30, {"normalize": "valid"}),
    ("mixed", 6, {"items_end": "eos", "weight_factor": 2.0}),
    ("equal", 8, {"deny_prefixes": [[5], [17]], "allow_prefixes": [[n] for n in range(1, 90)]}),
    ("mixed", 5, {"items_end": "eos", "normalize": "valid", "deny_items": ["item 1001"]}),
]
"""Catalogues, widths and options."""
LEFT_OUT = {"created", "model", "tokenizer", "model_name", "engine", "lora_request"}
"""Times and places, next to seconds."""


class Sent(NamedTuple):
    """A request."""

    prompt: dict[str, Any]
    params: SamplingParams
    lora: LoRARequest | None = None
    aborted_after: int | None = None
    """Steps from its arrival."""


Scenario = tuple[str, dict[str, Any], list[Sent]]
"""Its name, the engine's options, and its requests."""


def mixed(seed: int, count: int, most: int = 64, traced: bool = False) -> list[Sent]:
    """Requests with any sampling parameters, some of them with a prediction or a trace."""
    rng, sent = random.Random(seed), []
    for index in range(count):
        drawn = random_request(rng, seeds=True)
        params, tokens = drawn.params, drawn.prompt["prompt_token_ids"]
        params.max_tokens = min(params.max_tokens, most)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if params.allowed_token_ids:
            params.allowed_token_ids = params.allowed_token_ids[:1000]  # V2 takes 1024
        extra: dict[str, Any] = {}
        if index % 4 == 1:  # an answer that repeats the prompt, as a text or as tokens
            extra["prediction"] = tokenizer().decode(tokens) if index % 8 == 1 else tokens[4:]
        if index % 4 == 2 and traced:
            extra["speculation_trace"] = True
        params.extra_args = {**extra, **(params.extra_args or {})}
        aborted_after = 7 if index % 9 == 8 else None
        sent.append(Sent({"prompt_token_ids": tokens}, params, None, aborted_after))
    return sent


def repeated(count: int) -> list[Sent]:
    """Greedy chats: twice, with a salt, with a prediction, and with several samples."""
    greedy = SamplingParams(temperature=0.0, max_tokens=48, logprobs=1)
    several = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=32)
    chats = [Sent(one, greedy) for one in prompts(count)]
    salted = [Sent({**chat.prompt, "cache_salt": "mine"}, greedy) for chat in chats[:2]]
    predicted = [chat._replace(params=greedy.clone()) for chat in chats[:2]]
    for chat in predicted:
        chat.params.extra_args = {"prediction": chat.prompt["prompt_token_ids"][4:]}
    return [*predicted, *chats, *salted, chats[0]._replace(params=several), *chats]


def searches(most: int) -> list[Sent]:
    """Beam searches in Hugging Face's modes, with rules of tokens, and with options."""
    sent = [Sent(*request_of(case)) for case in few_cases(max_tokens=most)]
    sent += [Sent(*test_token_rules.request_of(*one)) for one in enumerate(test_token_rules.RULES)]
    for number, (options, sampling) in enumerate(SEARCHES):
        params = SamplingParams(
            n=4,
            extra_args={"beam_width": 6, **options},
            **{"temperature": 0.0, "max_tokens": most // 2, **sampling},
        )
        sent.append(Sent({"prompt_token_ids": list(prompt(70 + number, 24))}, params))
    return sent


def in_catalogues() -> list[Sent]:
    sent = []
    for number, (name, width, options) in enumerate(ITEMS):
        extra = {"beam_width": width, "items": name, **options}
        params = SamplingParams(n=3, temperature=0.0, max_tokens=12, logprobs=0, extra_args=extra)
        sent.append(Sent({"prompt_token_ids": list(prompt(90 + number, 20))}, params))
    return sent


def catalogues(folder: Path) -> dict[str, Any]:
    """Make the catalogues; return the engine's option for them."""
    equal, ragged = random_items(1, 2000, 0, (4, 4), 100), random_items(2, 1000, 0, (1, 5), 150)
    paths = {
        "equal": str(write(folder / "equal", equal)),
        "mixed": str(write(folder / "mixed", ragged, text_ids=True, weights=True)),
    }
    return {"additional_config": {"vllm_trie": {"items": paths}}}


def on_v2(folder: Path) -> Iterator[Scenario]:
    """Yield few and short scenarios: the interpreter takes tens of milliseconds for a token."""
    small = {**WIDE, "max_model_len": 256, "max_num_seqs": 8, **catalogues(folder)}
    few = [one for one in searches(8) + in_catalogues() if one.params.extra_args["beam_width"] < 7]
    some = mixed(11, 10, most=9) + few[:2]
    yield "searches", small, few
    yield "chains", {**small, **speculation("ngram_trie", 4, recycle=True)}, some
    trees = speculation("ngram_trie", 6, recycle=True, verification="tree")
    yield "trees", {**small, **trees}, some


def on_v1(folder: Path) -> Iterator[Scenario]:
    """Yield scenarios with each drafter, with files, adapters, searches, and with little room."""
    wide = {**WIDE, **catalogues(folder)}
    vocabulary = load_tokenizer(str(model_path())).vocabulary
    documents = [np.array(tokenizer().encode(text), dtype=np.int32) for text in texts()[::3]]
    write_corpus(folder / "corpus", documents, 2048, fingerprint(vocabulary))
    (folder / "traces").mkdir()
    learning = {"store_tokens": 1 << 18, "draft_timeout_s": 600.0}
    files = {"store_path": str(folder / "store"), "corpus": str(folder / "corpus")}
    memory = speculation("ngram_trie", 16, **learning, **files)
    trees = speculation("ngram_trie", 24, trace_path=str(folder / "traces"), **learning)
    yield "trees", {**wide, **trees}, mixed(1, 28, traced=True) + searches(12)[3:9]
    yield "memory", memory, repeated(10)
    yield "memory, started again", memory, repeated(4)
    yield "chains", speculation("ngram_trie", 8, verification="chain", **learning), mixed(2, 16)
    adapters = [None, *make_adapters(folder, 2)]
    # On CPUs, vLLM 0.32 computes requests without an adapter with the one in the last slot.
    lora = {**wide, "enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    requests = [*repeated(5), *searches(12)[:3]]
    adapted = [one._replace(lora=adapters[i % 3]) for i, one in enumerate(requests)]
    yield "adapters", {**lora, **speculation("ngram_trie", 12, **learning)}, adapted
    union = {"drafters": ["ngram", "medusa"], "model": HEADS}
    yield "union", speculation("trie_union", 24, **union), mixed(3, 12)
    yield "heads", speculation("medusa_dynamic", 16, model=HEADS), mixed(4, 10)
    yield "lookahead", speculation("lookahead_trie", 59), mixed(5, 12)
    yield "searches", {**wide, "async_scheduling": True}, searches(24) + in_catalogues()
    little = {**WIDE, "num_gpu_blocks_override": 7, "max_num_seqs": 8, "max_model_len": 96}
    crowded = [request_of(case) for case in cases((4, 3), length=60, max_tokens=12)]
    yield "little room", little, [Sent(*one) for one in crowded + greedy_requests(6, 20)]


def run(options: dict[str, Any], requests: list[Sent]) -> dict[str, Any]:
    """Start an engine and send it requests; return what it has answered and counted."""
    engines = Engines()
    llm = engines(**options, reasoning_config=ReasoningConfig(**THINKING))
    scheduler_of(llm).structured_output_manager._use_async_grammar_compilation = False
    result: dict[str, Any] = {"answers": _answers(llm, requests)}
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.6)
    (search,) = llm.beam_search([{"prompt": texts()[-1]}], params)
    result["LLM.beam_search"] = [
        _plain([one.tokens, one.text, one.cum_logprob]) for one in search.sequences
    ]
    # This tells the worker of the requests that have ended, and sends their statistics.
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    result["counters"] = _counters(llm)
    del llm
    engines.close()
    return result


def files_of(folder: Path) -> dict[str, Any]:
    """Return what the engines have written: traces, and texts of the store."""
    written: dict[str, Any] = {}
    for path in sorted(folder.glob("traces/*")):
        header, steps, end = read_trace(path)
        written[path.name] = _plain([header.model_dump(), [s.model_dump() for s in steps], end])
    for path in sorted(folder.glob("store/*.store")):
        written["store"] = [[t.salt.hex(), t.token_ids.tolist()] for t in read_store(path)]
    return written


def _answers(llm: Any, requests: list[Sent]) -> list[Any]:
    """Send requests while others run; return their outputs, None of those that were aborted."""
    core, finished, step = llm.llm_engine, {}, 0
    arrivals = [STEPS * (index // TOGETHER) for index in range(len(requests))]
    while step <= arrivals[-1] or core.has_unfinished_requests():
        for index, (one, arrival) in enumerate(zip(requests, arrivals, strict=True)):
            if step == arrival:
                params = one.params.clone()
                core.add_request(str(index), one.prompt, params, lora_request=one.lora)
            if one.aborted_after == step - arrival:
                core.abort_request([str(index)])
        finished |= {int(output.request_id): output for output in core.step() if output.finished}
        step += 1
    return [
        [_plain(choice) for choice in finished[index].outputs] if index in finished else None
        for index in range(len(requests))
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without times and places; numbers are rounded."""
    value = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "__dict__", value)
    if isinstance(value, Mapping):
        return {str(key): _plain(of) for key, of in value.items() if not _is_left_out(str(key))}
    if isinstance(value, float):
        return round(value, 4)
    return [_plain(of) for of in value] if isinstance(value, list | tuple) else value


def _is_left_out(name: str) -> bool:
    return "seconds" in name or name.endswith("tokens_per_step") or name in LEFT_OUT


def _counters(llm: Any) -> dict[str, Any]:
    """Return the counters of the engine's metrics, of its scheduler and of its worker."""
    counts = scheduler_of(llm).beam_counters
    counted: dict[str, Any] = {name: getattr(counts, name) for name in counts.__slots__}
    for metric in llm.get_metrics():
        kinds = ("vllm:trie_", "vllm:spec_decode_", "vllm:request_success")
        if metric.name.startswith(kinds) and not _is_left_out(metric.name):
            labels = [of for name, of in sorted(metric.labels.items()) if not _is_left_out(name)]
            value = getattr(metric, "values", None) or getattr(metric, "value", None)
            counted[" ".join([metric.name, *labels])] = _plain(value)
    if llm.llm_engine.vllm_config.speculative_config is not None:
        totals = trees_of(llm).totals
        counted["totals"] = _plain({name: getattr(totals, name) for name in totals.__slots__})
    return counted
