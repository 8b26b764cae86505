"""Teach a trained model not to loop: ``python -m vllm_trie.tiny_model.refine``.

Sequence-level unlikelihood training ("Neural Text Generation with Unlikelihood Training",
Welleck et al. 2019, equation 7), narrowed to what is wrong: the model decodes greedily, and only
tokens in the third or a later copy of a span are made less likely. Ordinary batches in the same
step keep what was learnt.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from vllm_trie.tiny_model.dataset import Dataset, RowFeed
from vllm_trie.tiny_model.decoding import greedy, looping_positions
from vllm_trie.tiny_model.model import TinyLlama, load_model, save_model
from vllm_trie.tiny_model.train import keep_freed_memory

_NEW_TOKENS = 128
_ROWS = 24


class PromptPool:
    """Batches of prompts of one length: the starts of plain code, or whole task prompts."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._plain, self._documents = dataset.plain, dataset.documents
        self._rng = random.Random(seed)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, split in enumerate(dataset.documents.splits.tolist()):
            by_length[split].append(index)
        self._by_length = [group for group in by_length.values() if len(group) >= _ROWS]

    def draw(self) -> list[list[int]]:
        if self._rng.random() < 0.5:
            group = self._rng.choice(self._by_length)
            chosen = (self._documents[index] for index in self._rng.sample(group, _ROWS))
            return [tokens[:split].tolist() for tokens, split in chosen]
        length = self._rng.randrange(8, 160)
        starts = [self._rng.randrange(len(self._plain) - length) for _ in range(_ROWS)]
        return [self._plain[start : start + length].tolist() for start in starts]


def unlikelihood(model: TinyLlama, prompts: list[list[int]]) -> tuple[Tensor | None, float]:
    """``(loss over looping tokens, share of prompts that loop)``; None where nothing loops."""
    outputs = greedy(model, prompts, _NEW_TOKENS)
    rows, columns, loops = [], [], 0
    length = len(prompts[0])
    ids = np.zeros((len(prompts), length + _NEW_TOKENS), np.int64)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids[row, : length + len(output)] = prompt + output
        positions = looping_positions(output)
        loops += bool(positions)
        rows += [row] * len(positions)
        columns += [length + position for position in positions]
    if not rows:
        return None, 0.0
    tokens = torch.from_numpy(ids)
    hidden = model.hidden(tokens, *model.rotary(ids.shape[1]))
    at, before = torch.tensor(rows), torch.tensor(columns) - 1
    log_p = model.logits(hidden[at, before]).log_softmax(-1)
    chosen = log_p.gather(1, tokens[at, before + 1][:, None]).squeeze(1)
    return -torch.log1p(-chosen.exp().clamp(max=1 - 1e-5)).mean(), loops / len(prompts)


def main(
    model: Annotated[Path, typer.Option(help="folder of the trained model")],
    data: Annotated[Path, typer.Option(help="folder of its data set")],
    out: Annotated[Path, typer.Option(help="folder for the refined model")],
    steps: Annotated[int, typer.Option()] = 150,
    learning_rate: Annotated[float, typer.Option(help="AdamW, falls to 0")] = 3e-4,
    weight: Annotated[float, typer.Option(help="of the unlikelihood loss")] = 0.5,
    threads: Annotated[int, typer.Option(help="torch threads")] = 3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Refine ``model`` and write it with its tokenizer to ``out``."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    trained = load_model(model)
    dataset = Dataset.load(next(iter(sorted(data.glob("data-*.npz")))))
    pool, feed = PromptPool(dataset, seed), RowFeed(dataset, seed + 1000)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=0.0)
    looping: list[float] = []
    bar = tqdm(range(steps), mininterval=5)
    for step in bar:
        loss, share = unlikelihood(trained, pool.draw())
        arrays = feed.batch(8, 512) if step % 4 else feed.batch(4, 1024)
        ids, targets, weights = (torch.from_numpy(array) for array in arrays)
        nll, _, square = trained(ids, targets, weights, *trained.rotary(ids.shape[1]))
        total = nll + 1e-4 * square
        if loss is not None:
            total = total + weight * loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        looping.append(share)
        bar.set_postfix(nll=f"{float(nll):.3f}", looping=f"{np.mean(looping[-20:]):.3f}")
        if step % 20 == 19:
            bar.write(f"step {step + 1} looping {np.mean(looping[-20:]):.3f} nll {float(nll):.3f}")
    save_model(trained, out)
    for name in ("tokenizer.json", "tokenizer_config.json", "training.json"):
        if (model / name).exists():
            (out / name).write_bytes((model / name).read_bytes())


if __name__ == "__main__":
    typer.run(main)
