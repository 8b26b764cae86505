"""The cost of drafting with Medusa heads, apart from its yield: parts of benchmarks/medusa.py."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from support.harness import Row
from support.stage import Stage, Turns
from vllm_trie.lab import local_engine


class TimedTurns(Turns):
    """Turns that also time what a drafter does apart from the products of its heads.

    Attributes:
        select: seconds for one request of all but the products, for each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.select: list[float] = []
        self._products = 0.0

    def time_heads(self, heads: Any) -> None:
        """Time the calls of these heads, a module of torch, from now on."""

        def begin(*unused: Any) -> None:
            self._products -= time.perf_counter()

        def end(*unused: Any) -> None:
            self._products += time.perf_counter()

        heads.register_forward_pre_hook(begin)
        heads.register_forward_hook(end)

    def propose(self, requests: Sequence[Any]) -> Any:
        start, self._products = time.perf_counter(), 0.0
        trees = super().propose(requests)
        if self._products:
            seconds = time.perf_counter() - start - self._products
            self.select.append(seconds / len(requests))
        return trees

    def take(self, skip: int = 0) -> Row:
        """Return medians over the calls since the last one, without the first `skip`; ms and us."""
        row = {
            "draft_ms": 1e3 * _median(self.seconds[skip:]),
            "select_us": 1e6 * _median(self.select[skip:]),
        }
        for values in (self.seconds, self.select):
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


def write_cost_model(folder: Path) -> tuple[str, str]:
    """Write the configuration of a model of 0.4 B parameters and random Medusa heads for it.

    Returns:
        The folders of the model and of the heads.
    """
    import torch

    from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads
    from vllm_trie.lab.medusa.writing import save_vllm

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
            turns.time_heads(stage.own.heads)
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
