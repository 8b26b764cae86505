"""Teach a trained model not to loop: ``python -m tools.tiny_model.refine``.

Sequence-level unlikelihood training ("Neural Text Generation with Unlikelihood Training",
Welleck et al. 2019, equation 7), narrowed to what is wrong: the model decodes greedily, and only
tokens in the third or a later copy of a span are made less likely. Ordinary batches in the same
step keep what was learnt.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from tools.tiny_model.data.dataset import Dataset, RowFeed
from tools.tiny_model.decoding import greedy, looping_positions
from tools.tiny_model.model import TinyLlama, load_model, save_model
from tools.tiny_model.optimizer import MuonAdamW
from tools.tiny_model.train import keep_freed_memory

_NEW_TOKENS = 128
_ROWS = 16
_LENGTH, _BATCH_TOKENS = 512, 8192


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
    length = len(prompts[0])
    loops = []
    for prompt, output in zip(prompts, greedy(model, prompts, _NEW_TOKENS), strict=True):
        positions = looping_positions(output)
        if positions:
            loops.append((prompt + output, [length + position for position in positions]))
    if not loops:
        return None, 0.0
    ids = np.zeros((len(loops), length + _NEW_TOKENS), np.int64)
    for row, (tokens, _) in enumerate(loops):
        ids[row, : len(tokens)] = tokens
    rows = torch.tensor([row for row, (_, columns) in enumerate(loops) for _ in columns])
    columns = torch.tensor([column for _, columns in loops for column in columns])
    batch = torch.from_numpy(ids)
    hidden = model.hidden(batch, *model.rotary(ids.shape[1]), torch.bfloat16)
    log_p = model.logits(hidden[rows, columns - 1]).log_softmax(-1)
    chosen = log_p.gather(1, batch[rows, columns][:, None]).squeeze(1)
    loss = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-5)).mean()
    return loss, len(loops) / len(prompts)


def main(
    model: Annotated[Path, typer.Option(help="folder of the trained model")],
    data: Annotated[Path, typer.Option(help="folder of its data set")],
    out: Annotated[Path, typer.Option(help="folder for the refined model")],
    minutes: Annotated[float, typer.Option(help="length of the run")] = 12.0,
    steps: Annotated[int, typer.Option(help="length in steps instead of minutes")] = 0,
    scale: Annotated[float, typer.Option(help="of the first run's peak learning rates")] = 0.25,
    weight: Annotated[float, typer.Option(help="of the unlikelihood loss")] = 0.5,
    every: Annotated[int, typer.Option(help="steps between looks for loops")] = 3,
    document_share: Annotated[float, typer.Option(help="rows of task documents")] = 0.6,
    blend: Annotated[float, typer.Option(help="share of the refined weights in the result")] = 0.5,
    threads: Annotated[int, typer.Option(help="torch threads")] = 4,
    seed: Annotated[int, typer.Option()] = 0,
    compile: Annotated[bool, typer.Option(help="use torch.compile (needs a C++ compiler)")] = True,
) -> None:
    """Refine ``model``, with more task documents than before, and write it to ``out``."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    trained = load_model(model)
    dataset = Dataset.load(next(iter(sorted(data.glob("data-*.npz")))))
    pool = PromptPool(dataset, seed)
    feed = RowFeed(dataset, seed + 1000, document_share, snippet_share=0.15)
    optimizer = MuonAdamW(trained)
    forward = torch.compile(trained, dynamic=False) if compile else trained
    rotary = trained.rotary(_LENGTH)
    looping: list[float] = []
    step, begin = 0, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((model / name).read_bytes())
    with tqdm(total=1.0, disable=None, bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
        while True:
            progress = step / steps if steps else (time.monotonic() - begin) / (60 * minutes)
            if progress >= 1:
                break
            arrays = feed.batch(_BATCH_TOKENS // _LENGTH, _LENGTH)
            nll, _, square = forward(*(torch.from_numpy(array) for array in arrays), *rotary)
            (nll + 1e-4 * square).backward()
            if step % every == 0:
                loss, share = unlikelihood(trained, pool.draw())
                looping.append(share)
                if loss is not None:
                    (weight * loss).backward()
            optimizer.step(scale * min(1.0, (step + 1) / 10) * (1 - progress))
            step += 1
            recent = float(np.mean(looping[-20:]))
            bar.n = progress
            bar.set_postfix_str(f"step {step} loss {float(nll.detach()):.3f} loops {recent:.3f}")
            if step % 30 == 0:
                bar.write(f"step {step} loss {float(nll.detach()):.3f} loops {recent:.3f}")
                save_model(trained, out)
    # Halfway between the two models most loops are gone, at next to no loss in likelihood.
    with torch.no_grad():
        for parameter, original in zip(
            trained.parameters(), load_model(model).parameters(), strict=True
        ):
            parameter.copy_(original.lerp(parameter, blend))
    save_model(trained, out)
    record = json.loads((model / "training.json").read_text())
    record["refine"] = {
        "steps": step,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "tokens": step * _BATCH_TOKENS,
        "scale": scale,
        "weight": weight,
        "every": every,
        "document_share": document_share,
        "blend": blend,
        "looping": [
            round(float(np.mean(looping[at : at + 20])), 3) for at in range(0, len(looping), 20)
        ],
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
