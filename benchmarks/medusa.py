"""Medusa drafting on held-out text: chain, fixed trees and dynamic trees at the same node count.

One engine decodes greedily; the methods take turns in it, so that all see the same minutes of the
machine. The prompts are task documents from modules that neither the model nor the heads saw, and
prompts written by hand. `tokens_per_step` counts tokens for each verification of a request.

    chain        the heads' likeliest tokens
    fixed        Medusa's published tree, its first n nodes
    fitted       a fixed tree fitted to these heads' accuracy on the very outputs, which is the best
                 that a fixed tree can do, and more than one fitted elsewhere would reach
    dynamic      the best paths by the product of the heads' probabilities
    context      the same depth, with probabilities corrected by the request's own text
    context_deep the default of `medusa_dynamic`: as deep as the text supports

With `--cost`, a model of 0.4 B parameters with random weights (hidden size 1024, 24 layers, 32,000
tokens) tells what drafting costs beside a model step: `draft_ms` is all of it. `choose_us` is what
lies between the heads' products and the trees, for one request: likeliest tokens, softmax, choice
of the nodes, tree. `select_us` is that and all Python before it: everything but the products.

    python benchmarks/medusa.py --json medusa.json
    python benchmarks/medusa.py --cost

With `--heads-alone`, such heads without a model: what torch's and the compiled heads take until
each head's candidates are known, for several numbers of requests.

    OMP_NUM_THREADS=4 python benchmarks/medusa.py --heads-alone
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import c_int64
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Row, finish, in_turns, median_seconds, option_parser, quietly

from vllm_trie.demo import engines

COLUMNS = (
    "method",
    "nodes",
    "batch_size",
    "tokens_per_step",
    "ratio_to_fixed",
    "tokens_per_s",
    "ratio_to_plain",
    "draft_ms",
    "select_us",
    "choose_us",
    "model_ms",
    "draft_over_model",
    "predicted_over_accepted",
    "identical",
)
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "fixed": {"tree": "fixed"},
    "fitted": {},
    "dynamic": {"joint": "product"},
    "context": {"joint": "context", "max_depth": 4},
    "context_deep": {"joint": "context"},
}


class TurnTaker:
    """A drafter that hands every call to the contestant whose turn it is, and keeps its times."""

    name = "medusa_dynamic"
    needs_hidden_states = True
    needs_node_argmax = False

    def __init__(self, first: Any) -> None:
        self.drafter: Any = first
        self.max_nodes = 64
        self.draft_seconds: list[float] = []
        self.select_seconds: list[tuple[float, float]] = []
        self.predicted = 0.0

    def propose(self, requests: Sequence[Any]) -> Any:
        start = time.perf_counter()
        if self.drafter is None:
            from vllm_trie.tree import TokenTree

            return [TokenTree.empty()] * len(requests)
        for request in requests:
            request.max_nodes = min(request.max_nodes, self.max_nodes)
        trees = self.drafter.propose(requests)
        self.draft_seconds.append(time.perf_counter() - start)
        self.predicted += float(sum(tree.probabilities.sum() for tree in trees))
        return trees

    def release(self, request_id: str) -> None:
        if self.drafter is not None:
            self.drafter.release(request_id)


def time_selection(drafter: Any, sink: list[tuple[float, float]]) -> None:
    """Let the drafter note for one request how long everything takes that is not the heads, and how
    much of it comes after them.

    The first is the whole of `propose` less the products: where the heads are compiled, these are
    timed by the compiled code (gathering the hidden states, residual blocks, output layers; the
    logits of each block of outputs are looked at in between, which counts as selection), else the
    call of the heads is. The second leaves out what comes before the compiled code is entered, or
    before the heads have answered.
    """
    products = c_int64()
    heads_seconds = begun = 0.0
    stock_propose, stock_ask = drafter.propose, drafter._ask_heads
    stock_compiled = drafter._compiled_heads

    def compiled_heads() -> Any:
        compiled = stock_compiled()
        if compiled is not None and compiled.product_nanoseconds is None:
            compiled.product_nanoseconds = products
            stock_draft = compiled._draft

            def draft(*arguments: Any) -> Any:
                nonlocal begun
                begun = time.perf_counter()
                return stock_draft(*arguments)

            compiled._draft = draft
        return compiled

    def ask_heads(states: Any) -> Any:
        nonlocal heads_seconds, begun
        start = time.perf_counter()
        logits = stock_ask(states)
        begun = time.perf_counter()
        heads_seconds = begun - start
        return logits

    def propose(requests: Any) -> Any:
        nonlocal heads_seconds, begun
        heads_seconds, products.value = 0.0, 0
        start = begun = time.perf_counter()
        trees = stock_propose(requests)
        end = time.perf_counter() - 1e-9 * products.value
        sink.append(((end - start - heads_seconds) / len(requests), (end - begun) / len(requests)))
        return trees

    drafter.propose, drafter._ask_heads = propose, ask_heads
    drafter._compiled_heads = compiled_heads


def selection(noted: Sequence[tuple[float, float]]) -> Row:
    """Columns of what `time_selection` noted."""
    select, choose = (1e6 * median(seconds) for seconds in zip(*noted, strict=True))
    return {"select_us": select, "choose_us": choose}


def time_model(runner: Any) -> list[float]:
    """A list that grows by the seconds of each forward pass of the model."""
    seen: list[float] = []
    stock = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = stock(*args, **kwargs)
        seen.append(time.perf_counter() - start)
        return output

    runner.execute_model = execute_model
    return seen


def make_drafter(first: Any, options: dict[str, Any]) -> Any:
    """Another drafter on the heads of the engine's own."""
    from vllm_trie.drafters import parse_options
    from vllm_trie.drafters.medusa import MedusaDrafter

    drafter = MedusaDrafter(parse_options("medusa_dynamic", options), first.context)
    drafter._heads, drafter._reading = first._heads, first._reading
    return drafter


def held_out_prompts(model: str, per_kind: int) -> list[list[int]]:
    """Tokens of task documents from held-out modules and of the prompts written by hand."""
    from tools.tiny_model.data.tokenizer import load_tokenizer
    from tools.tiny_model.evaluate import held_out_documents
    from tools.tiny_model.prompts import HAND_PROMPTS

    tokenizer = load_tokenizer(Path(model))
    texts = [document.prompt for document in held_out_documents(per_kind)]
    texts += [prompt.render() for prompt in HAND_PROMPTS]
    return [tokenizer.encode(text).ids for text in texts]


def rank_accuracies(first: Any, llm: Any, prompts: list[list[int]], max_tokens: int) -> np.ndarray:
    """How often each head's candidate of each rank is what plain decoding then says: [K, 32]."""
    import torch

    from tools.tiny_model.model import load_model
    from vllm_trie.drafters.medusa.candidates import HeadLogits, top_candidates

    model = load_model(Path(first.context.model))
    heads, num_heads = first._heads, len(first._reading[0])
    found = np.zeros((num_heads, 32))
    places = 0
    for prompt, output in zip(prompts, generate(llm, prompts, max_tokens, 8), strict=True):
        if len(output) <= num_heads + 1:
            continue
        ids = torch.tensor([prompt + output])
        with torch.inference_mode():
            hidden = model.hidden(ids, *model.rotary(ids.shape[1]))[0, len(prompt) - 1 :]
            logits = heads(hidden.float(), num_heads)
            tokens, _ = top_candidates(HeadLogits(logits, *first._reading))
        count = len(output) - num_heads - 1
        places += count
        for head in range(num_heads):
            right = np.array(output[head + 1 : head + 1 + count])
            found[head] += (tokens[:count, head] == right[:, None]).sum(axis=0)
    return found / max(places, 1)


def generate(
    llm: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
) -> list[list[int]]:
    """Outputs, `batch_size` requests at a time."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, detokenize=False)
    outputs = []
    for start in range(0, len(prompts), batch_size):
        part = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + batch_size]]
        outputs += llm.generate(part, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(options: Any) -> list[Row]:
    """Rows of all methods at all node counts on the shipped model."""
    from vllm_trie.drafters.medusa.trees import fit_paths
    from vllm_trie.tiny_model import medusa_path, model_path

    model = options.model or str(model_path())
    prompts = held_out_prompts(model, options.per_kind)[: options.prompts]
    budget = max(options.nodes)
    llm = engines.start_engine(
        model,
        max_model_len=engines.room_for(max(map(len, prompts)), options.max_tokens, budget),
        max_num_seqs=max(8, options.batch_size),
        speculative_config={
            "method": "medusa_dynamic",
            "model": options.heads or str(medusa_path()),
            "num_speculative_tokens": budget,
            # All methods shall verify all of their nodes.
            "node_budget": "fixed",
        },
    )
    runner = engines.runner_of(llm)
    first = runner._guarded.drafter
    turns = runner._guarded.drafter = TurnTaker(None)
    model_seconds = time_model(runner)
    plain = generate(llm, prompts, options.max_tokens, options.batch_size)
    accuracies = rank_accuracies(first, llm, prompts, options.max_tokens)

    seen: dict[tuple[str, int], dict[str, Any]] = {}
    runs: dict[tuple[str, int], Callable[[], Any]] = {}

    def add(method: str, nodes: int, drafter: Any) -> None:
        note: dict[str, Any] = {"select": [], "draft": [], "model": [], "counts": []}
        seen[method, nodes] = note
        if drafter is not None:
            time_selection(drafter, note["select"])

        def run() -> Any:
            turns.drafter, turns.max_nodes = drafter, nodes
            turns.draft_seconds, turns.predicted = note["draft"], 0.0
            model_seconds.clear()
            totals = runner.tree_totals
            before = totals.steps, totals.tokens
            outputs = generate(llm, prompts, options.max_tokens, options.batch_size)
            steps, tokens = totals.steps - before[0], totals.tokens - before[1]
            note["counts"].append((steps, tokens, turns.predicted))
            note["model"] += model_seconds
            return outputs

        runs[method, nodes] = run

    add("plain", 0, None)
    for nodes in options.nodes:
        for method in METHODS:
            settings = dict(METHODS[method])
            if method == "fitted":
                settings["tree"] = [list(path) for path in fit_paths(accuracies, nodes)]
            add(method, nodes, make_drafter(first, settings))
    timed = in_turns(runs, options.repeats)

    plain_seconds = median_seconds(timed["plain", 0])
    num_tokens = sum(map(len, plain))
    rows = []
    for (method, nodes), repeats in timed.items():
        note, seconds = seen[method, nodes], median_seconds(repeats)
        steps, tokens, predicted = note["counts"][0]
        row: Row = {
            "method": method,
            "nodes": nodes,
            "batch_size": options.batch_size,
            "tokens_per_step": tokens / steps,
            "tokens_per_s": num_tokens / seconds,
            "ratio_to_plain": plain_seconds / seconds,
            "model_ms": 1e3 * median(note["model"]),
            "draft_ms": 1e3 * median(note["draft"]) if note["draft"] else 0.0,
            "identical": all(outputs == plain for _, outputs in repeats),
        }
        if note["select"]:
            row |= selection(note["select"])
        if method != "plain":
            row["draft_over_model"] = row["draft_ms"] / row["model_ms"]
            row["predicted_over_accepted"] = predicted / max(1, tokens - steps)
        rows.append(row)
    for row in rows:
        of_fixed = [r for r in rows if r["method"] == "fixed" and r["nodes"] == row["nodes"]]
        if of_fixed:
            row["ratio_to_fixed"] = row["tokens_per_step"] / of_fixed[0]["tokens_per_step"]
    return rows


def cost(options: Any) -> list[Row]:
    """What drafting costs beside a step of a model of 0.4 B parameters, in bfloat16."""
    import torch

    from vllm_trie.drafters.medusa.checkpoint import save_vllm
    from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads

    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, heads_folder = Path(folder) / "model", Path(folder) / "heads"
        model.mkdir()
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
        config |= {"tie_word_embeddings": True, "max_position_embeddings": 2048}
        (model / "config.json").write_text(json.dumps(config))
        heads = MedusaHeads(HeadsShape(4, 1, 1024, 32_000, 32_000))
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.05)
        save_vllm(heads, heads_folder)
        del heads
        for nodes in options.nodes:
            llm = engines.start_engine(
                str(model),
                max_model_len=1024,
                max_num_seqs=options.batch_size,
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                speculative_config={
                    "method": "medusa_dynamic",
                    "model": str(heads_folder),
                    "num_speculative_tokens": nodes,
                    "node_budget": "fixed",
                },
            )
            runner = engines.runner_of(llm)
            turns = TurnTaker(runner._guarded.drafter)
            time_selection(turns.drafter, turns.select_seconds)
            turns.max_nodes = nodes
            runner._guarded.drafter = turns
            model_seconds = time_model(runner)
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, 32_000, 512).tolist() for _ in range(options.batch_size)]
            # The argmax of random weights runs in a loop, which a few steps would be through.
            generate(llm, prompts, 4 + 10 * options.repeats, options.batch_size, temperature=1.0)
            row = {
                "method": "cost_0.4b",
                "nodes": nodes,
                "batch_size": options.batch_size,
                # The first steps are the prefill and warm-up.
                "model_ms": 1e3 * median(model_seconds[2:]),
                "draft_ms": 1e3 * median(turns.draft_seconds[2:]),
                **selection(turns.select_seconds[2:]),
            }
            row["draft_over_model"] = row["draft_ms"] / row["model_ms"]
            row["select_over_model"] = 1e-3 * row["select_us"] * options.batch_size
            row["select_over_model"] /= row["model_ms"]
            rows.append(row)
            del llm, runner, turns
    return rows


def heads_alone(options: Any) -> list[Row]:
    """Torch's heads against the compiled ones, from hidden states to candidates, in bfloat16."""
    import torch

    from vllm_trie.drafters.medusa.candidates import HeadLogits, top_candidates
    from vllm_trie.drafters.medusa.compiled_heads import MAX_ROWS, CompiledHeads, in_huge_pages
    from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads

    heads = MedusaHeads(HeadsShape(4, 1, 1024, 32_000, 32_000), torch.bfloat16)
    for parameter in heads.requires_grad_(False).parameters():
        parameter.normal_(std=0.05)
        parameter.data = in_huge_pages(parameter.data)
    temperatures = torch.ones(4)
    compiled = CompiledHeads(heads, temperatures, 32)
    rows: list[Row] = []
    for number in (1, 2, 4, 8, 16, MAX_ROWS):
        states = torch.randn(number, 1024).bfloat16()
        addresses = compiled.rows(states)

        def with_torch(states: Any = states) -> Any:
            return top_candidates(HeadLogits(heads(states), temperatures, None, 32))

        def in_compiled_code(addresses: Any = addresses) -> Any:
            return compiled.top_candidates(addresses)

        contestants: dict[Any, Callable[[], Any]] = {
            "torch": with_torch,
            "compiled": in_compiled_code,
        }
        timed = in_turns(contestants, options.repeats + 1)
        for method, repeats in timed.items():
            milliseconds = 1e3 * median_seconds(repeats[1:])
            rows.append({"method": method, "batch_size": number, "heads_ms": milliseconds})
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", help="a small model of this project; the shipped one")
    parser.add_argument("--heads", help="its Medusa heads; the shipped ones")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-kind", type=int, default=2, help="held-out documents of a kind")
    parser.add_argument("--prompts", type=int, default=None, help="use the first so many prompts")
    parser.add_argument("--cost", action="store_true", help="cost beside a 0.4 B model instead")
    parser.add_argument(
        "--heads-alone", action="store_true", help="torch's heads and compiled ones"
    )
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    measure = heads_alone if options.heads_alone else cost if options.cost else compare
    rows = quietly(measure, options)
    columns = (*COLUMNS, "select_over_model", "heads_ms")
    present = [name for name in columns if any(name in row for row in rows)]
    finish(rows, options.json, present)


if __name__ == "__main__":
    main()
