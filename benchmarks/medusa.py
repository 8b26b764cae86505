"""Medusa drafting on held-out text: chain, fixed trees and dynamic trees with the same node count.

One engine decodes greedily; the methods take turns in it, so that all see the same minutes of the
machine. The prompts are task documents from modules that neither the model nor the heads saw, and
prompts written by hand. `tokens_per_step` counts tokens for each verification of a request.

    chain        the heads' likeliest tokens
    fixed        Medusa's published tree, its first n nodes
    fitted       a fixed tree fitted to these heads' accuracy on the very outputs: an upper bound
                 for fixed trees
    dynamic      the best paths by the product of the heads' probabilities
    context      the same depth, with probabilities corrected by the request's own text
    context_deep the default of `medusa_dynamic`: as deep as the text supports

`--cost` compares drafting with the steps of a model of 0.4 B parameters with random weights (hidden
size 1024, 24 layers, 32,000 tokens). `draft_ms` is all of it. `choose_us` is the time between the
heads' products and the trees, for one request: likeliest tokens, softmax, choice of the nodes,
tree. `select_us` adds all Python before the products: everything but the products.

    python benchmarks/medusa.py --json medusa.json
    python benchmarks/medusa.py --cost

`--heads-alone` runs such heads without a model: the time of torch's and of the compiled heads until
each head's candidates are known, for several numbers of requests.

    OMP_NUM_THREADS=4 python benchmarks/medusa.py --heads-alone
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from support.engines import decode
from support.harness import (
    Row,
    Timed,
    add_model_option,
    finish,
    interleave,
    median_seconds,
    option_parser,
    run_quietly,
)
from support.stage import Stage, Turns

from vllm_trie import local_engine

COLUMNS = (
    "method", "nodes", "batch_size", "tokens_per_step", "ratio_to_fixed", "tokens_per_s",
    "ratio_to_plain", "draft_ms", "select_us", "choose_us", "model_ms", "draft_over_model",
    "predicted_over_accepted", "identical", "select_over_model", "heads_ms",
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "fixed": {"tree": "fixed"},
    "fitted": {},
    "dynamic": {"joint": "product"},
    "context": {"joint": "context", "max_depth": 4},
    "context_deep": {"joint": "context"},
}


class TimedTurns(Turns):
    """Turns that also time what a drafter does apart from the products of its heads.

    Attributes:
        select: seconds for one request of all but the products, for each call.
        choose: the part of them after the heads were asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.select: list[float] = []
        self.choose: list[float] = []

    def propose(self, requests: Sequence[Any]) -> Any:
        start = time.perf_counter()
        trees = super().propose(requests)
        if self.drafter is not None:
            timing, end = self.drafter.timing, time.perf_counter() - self.drafter.timing.products
            self.select.append((end - start) / len(requests))
            self.choose.append((end - timing.asked) / len(requests))
        return trees

    def take(self, skip: int = 0) -> Row:
        """Return medians over the calls since the last one, without the first `skip`; ms and us."""
        row = {
            "draft_ms": 1e3 * _median(self.seconds[skip:]),
            "select_us": 1e6 * _median(self.select[skip:]),
            "choose_us": 1e6 * _median(self.choose[skip:]),
        }
        for values in (self.seconds, self.select, self.choose):
            values.clear()
        return row


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def time_model(runner: Any) -> list[float]:
    """Return a list that grows by the seconds of each forward pass of the model."""
    seen: list[float] = []
    stock = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = stock(*args, **kwargs)
        seen.append(time.perf_counter() - start)
        return output

    runner.execute_model = execute_model
    return seen


def new_drafter(first: Any, options: dict[str, Any]) -> Any:
    """Make another drafter on the heads of the engine's own."""
    from vllm_trie.drafters import parse_options
    from vllm_trie.drafters.medusa import HeadTiming, MedusaDrafter

    drafter = MedusaDrafter(parse_options("medusa_dynamic", options), first.context)
    drafter.set_heads(first.heads, first.temperatures)
    drafter.timing = HeadTiming()
    return drafter


def rank_accuracies(first: Any, prompts: list[list[int]], outputs: list[list[int]]) -> np.ndarray:
    """Measure how often each head's candidate of each rank is the model's own token.

    Args:
        first: the engine's drafter.
        prompts, outputs: of plain greedy decoding.

    Returns:
        float64 [K, 32].
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(first.context.model, dtype=torch.float32).eval()
    num_heads = len(first.temperatures)
    found = np.zeros((num_heads, 32))
    places = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        count = len(output) - num_heads - 1
        if count <= 0:
            continue
        with torch.inference_mode():
            hidden = model.model(torch.tensor([prompt + output])).last_hidden_state[0]
            tokens, _ = first.top_candidates(hidden[len(prompt) - 1 :])
        places += count
        for head in range(num_heads):
            right = np.array(output[head + 1 : head + 1 + count])
            found[head] += (tokens[:count, head] == right[:, None]).sum(axis=0)
    return found / max(places, 1)


def compare(options: Any) -> list[Row]:
    """Measure all methods at all node counts on the shipped model."""
    from support.fitted_trees import fit_paths
    from support.prompts import held_out_tasks, written_by_hand
    from vllm import SamplingParams

    from vllm_trie.tiny_model import medusa_path, model_path

    model = options.model or str(model_path())
    prompts = held_out_tasks(model, options.per_kind)
    prompts += [prompt for prompts in written_by_hand(model).values() for prompt in prompts]
    prompts = prompts[: options.prompts]
    budget, size = max(options.nodes), options.batch_size
    llm = local_engine.start_engine(
        model,
        max_model_len=local_engine.room_for(max(map(len, prompts)), options.max_tokens, budget),
        max_num_seqs=max(8, size),
        speculative_config={
            "method": "medusa_dynamic",
            "model": options.heads or str(medusa_path()),
            "num_speculative_tokens": budget,
            "node_budget": "fixed",  # every method verifies all of its nodes
        },
    )
    turns = TimedTurns()
    stage = Stage(llm, turns)
    model_seconds = time_model(local_engine.runner_of(llm))
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, detokenize=False)
    plain = decode(llm, prompts, params, size)
    accuracies = rank_accuracies(stage.own, prompts, plain)

    def measured(drafter: Any, nodes: int) -> tuple[list[list[int]], Row]:
        turns.predicted = 0.0
        model_seconds.clear()
        outputs, counts = stage.run(drafter, nodes, prompts, params, size)
        accepted = max(1, counts.tokens - counts.steps)
        return outputs, {
            "tokens_per_step": counts.tokens / counts.steps,
            "model_ms": 1e3 * median(model_seconds),
            "predicted_over_accepted": turns.predicted / accepted,
            **turns.take(),
        }

    runs: dict[tuple[str, int], Callable[[], Any]] = {("plain", 0): lambda: measured(None, 0)}
    for nodes in options.nodes:
        for method, settings in METHODS.items():
            if method == "fitted":
                settings = {"tree": [list(path) for path in fit_paths(accuracies, nodes)]}
            drafter = new_drafter(stage.own, settings)
            runs[method, nodes] = lambda drafter=drafter, nodes=nodes: measured(drafter, nodes)
    timed = interleave(runs, options.repeats)

    return method_rows(timed, plain, size)


def method_rows(
    timed: dict[tuple[str, int], Timed], plain: list[list[int]], batch_size: int
) -> list[Row]:
    """Return a row for each method and number of nodes.

    Args:
        timed: by method and number of nodes; each run returned its outputs and figures.
        plain: outputs of plain decoding.
        batch_size: requests at a time.
    """
    plain_seconds = median_seconds(timed["plain", 0])
    rows = {}
    for (method, nodes), repeats in timed.items():
        seconds = median_seconds(repeats)
        times = [row for _, (_, row) in repeats]
        row = rows[method, nodes] = {
            "method": method,
            "nodes": nodes,
            "batch_size": batch_size,
            "tokens_per_step": times[0]["tokens_per_step"],
            "tokens_per_s": sum(map(len, plain)) / seconds,
            "ratio_to_plain": plain_seconds / seconds,
            "model_ms": median(each["model_ms"] for each in times),
            "draft_ms": median(each["draft_ms"] for each in times),
            "identical": all(outputs == plain for _, (outputs, _) in repeats),
        }
        if method == "plain":
            continue
        row |= {key: median(each[key] for each in times) for key in ("select_us", "choose_us")}
        row["draft_over_model"] = row["draft_ms"] / row["model_ms"]
        row["predicted_over_accepted"] = times[0]["predicted_over_accepted"]
    for (_, nodes), row in rows.items():
        if ("fixed", nodes) in rows:
            fixed = rows["fixed", nodes]["tokens_per_step"]
            row["ratio_to_fixed"] = row["tokens_per_step"] / fixed
    return list(rows.values())


def write_cost_model(folder: Path) -> tuple[str, str]:
    """Write the configuration of a model of 0.4 B parameters and random Medusa heads for it.

    Returns:
        The folders of the model and of the heads.
    """
    import torch

    from vllm_trie.drafters.medusa.checkpoint import save_vllm
    from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads

    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    config |= {"tie_word_embeddings": True, "max_position_embeddings": 2048}
    model, heads_folder = folder / "model", folder / "heads"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    heads = MedusaHeads(HeadsShape(4, 1, 1024, 32_000, 32_000))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.05)
    save_vllm(heads, heads_folder)
    return str(model), str(heads_folder)


def cost(options: Any) -> list[Row]:
    """Compare drafting with a step of a model of 0.4 B parameters, in bfloat16."""
    from vllm import SamplingParams

    from vllm_trie.drafters.medusa import HeadTiming

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, heads = write_cost_model(Path(folder))
        for nodes in options.nodes:
            llm = local_engine.start_engine(
                model,
                max_model_len=1024,
                max_num_seqs=options.batch_size,
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                speculative_config={
                    "method": "medusa_dynamic",
                    "model": heads,
                    "num_speculative_tokens": nodes,
                    "node_budget": "fixed",
                },
            )
            turns = TimedTurns()
            stage = Stage(llm, turns)
            stage.own.timing = HeadTiming()
            model_seconds = time_model(local_engine.runner_of(llm))
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, 32_000, 512).tolist() for _ in range(options.batch_size)]
            # Sampled: greedy output of random weights loops, and accepted drafts would end the run
            # after a few steps.
            params = SamplingParams(
                temperature=1.0, max_tokens=4 + 10 * options.repeats, detokenize=False
            )
            stage.run(stage.own, nodes, prompts, params, options.batch_size)
            row = {
                "method": "cost_0.4b",
                "nodes": nodes,
                "batch_size": options.batch_size,
                # The first steps are the prefill and warm-up.
                "model_ms": 1e3 * median(model_seconds[2:]),
                **turns.take(skip=2),
            }
            row["draft_over_model"] = row["draft_ms"] / row["model_ms"]
            row["select_over_model"] = 1e-3 * row["select_us"] * options.batch_size
            row["select_over_model"] /= row["model_ms"]
            rows.append(row)
            del llm, stage, turns
    return rows


def heads_alone(options: Any) -> list[Row]:
    """Compare torch's heads with the compiled ones, from hidden states to candidates."""
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

        runs: dict[str, Callable[[], Any]] = {
            "torch": with_torch,
            "compiled": partial(compiled.top_candidates, addresses),
        }
        timed = interleave(runs, options.repeats + 1)
        for method, repeats in timed.items():
            milliseconds = 1e3 * median_seconds(repeats[1:])
            rows.append({"method": method, "batch_size": number, "heads_ms": milliseconds})
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    add_model_option(parser, "folder of a model; the shipped one if left out")
    parser.add_argument("--heads", help="its Medusa heads; the shipped ones if left out")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-kind", type=int, default=2, help="held-out documents of a kind")
    parser.add_argument("--prompts", type=int, default=None, help="use only the first prompts")
    parser.add_argument("--cost", action="store_true", help="cost for a 0.4 B model instead")
    parser.add_argument("--heads-alone", action="store_true", help="the heads without a model")
    options = parser.parse_args()
    measure = heads_alone if options.heads_alone else cost if options.cost else compare
    finish(run_quietly(measure, options), options.json, COLUMNS)


if __name__ == "__main__":
    main()
