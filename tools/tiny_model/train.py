"""Train the shipped model on a CPU: ``python -m tools.tiny_model.train --out DIR``."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from tools.tiny_model.data.corpus import load_corpus
from tools.tiny_model.data.dataset import Dataset, RowFeed, build_dataset
from tools.tiny_model.induction import set_induction_heads
from tools.tiny_model.losses import held_out_losses
from tools.tiny_model.model import ModelConfig, TinyLlama, save_model
from tools.tiny_model.optimizer import MuonAdamW

_WARMUP_STEPS = 40
_Z_LOSS = 1e-4


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result, apart from the model's shape and the corpus.

    ``steps`` fixes the length; where it is 0, ``minutes`` does, and the learning rate follows the
    clock. ``stages`` are ``(up to this part of the run, tokens per row)``.
    """

    minutes: float = 35.0
    steps: int = 0
    batch_tokens: int = 8192
    stages: tuple[tuple[float, int], ...] = ((0.6, 512), (0.9, 1024), (1.0, 2048))
    matrix_lr: float = 0.02
    other_lr: float = 0.01
    weight_decay: float = 0.05
    label_smoothing: float = 0.02
    induction_strength: float = 0.4
    document_share: float = 0.36
    snippet_share: float = 0.14
    seed: int = 0


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: handing them back costs page faults every step."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 1 << 29)


class Trainer:
    """One run; :meth:`state` and :meth:`resume` carry it over an interruption."""

    def __init__(self, model: TinyLlama, data: Dataset, config: TrainConfig) -> None:
        self.model, self.data, self.config = model, data, config
        self.optimizer = MuonAdamW(model, config.matrix_lr, config.other_lr, config.weight_decay)
        self.feed = RowFeed(data, config.seed, config.document_share, config.snippet_share)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.log: list[dict[str, float]] = []
        self._recent: deque[float] = deque(maxlen=100)

    @property
    def progress(self) -> float:
        if self.config.steps:
            return self.step / self.config.steps
        return self.seconds / (60 * self.config.minutes)

    def run_step(self, forward: torch.nn.Module) -> float:
        """One batch and one update; the loss in nats."""
        begin, config = time.monotonic(), self.config
        length = next(tokens for end, tokens in config.stages if self.progress < end)
        batch = self.feed.batch(max(1, config.batch_tokens // length), length)
        ids, targets, weights = (torch.from_numpy(array) for array in batch)
        nll, uniform, square = forward(ids, targets, weights, *self._rotary(length))
        smoothing = config.label_smoothing
        ((1 - smoothing) * nll + smoothing * uniform + _Z_LOSS * square).backward()
        scale = min(1.0, (self.step + 1) / _WARMUP_STEPS) * max(0.0, 1 - self.progress)
        self.optimizer.step(scale, momentum=min(0.95, 0.85 + 0.0005 * self.step))
        self.step += 1
        self.tokens += ids.numel()
        self.seconds += time.monotonic() - begin
        self._recent.append(float(nll.detach()))
        return sum(self._recent) / len(self._recent)

    def warm_up(self, forward: torch.nn.Module) -> None:
        """Compile for every row length before the clock starts."""
        for _, length in self.config.stages:
            ids = torch.zeros(max(1, self.config.batch_tokens // length), length, dtype=torch.int64)
            sum(forward(ids, ids, torch.ones(ids.shape), *self._rotary(length))).backward()
        self.model.zero_grad(set_to_none=True)

    def evaluate(self) -> dict[str, float]:
        entry = {"step": self.step, "tokens": self.tokens, "minutes": round(self.seconds / 60, 2)}
        losses = held_out_losses(self.model, self.data.held_plain, self.data.held_documents)
        entry |= {name: round(value, 4) for name, value in losses.items()}
        self.log.append(entry)
        return entry

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        return self.model.rotary(length)

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "feed": self.feed.state(),
            "counters": (self.step, self.tokens, self.seconds),
            "log": self.log,
        }

    def resume(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.feed.set_state(state["feed"])
        self.step, self.tokens, self.seconds = state["counters"]
        self.log = state["log"]


def prepare_data(folder: Path, model_folder: Path, seed: int, documents: int) -> Dataset:
    """Build the data set, or read it where ``folder`` already holds it."""
    path = folder / f"data-{seed}-{documents}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        build_dataset(load_corpus(), folder, seed, documents).save(path)
    model_folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).write_bytes((folder / name).read_bytes())
    return Dataset.load(path)


def export(trainer: Trainer, folder: Path) -> None:
    """Write the model and ``training.json``, the record of the run."""
    save_model(trainer.model, folder)
    record = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "config": asdict(trainer.config),
        "model": asdict(trainer.model.config),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "minutes": round(trainer.seconds / 60, 1),
        "log": trainer.log,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="folder for the model")],
    data: Annotated[Path | None, typer.Option(help="folder for the data set; OUT/data")] = None,
    minutes: Annotated[float, typer.Option(help="length of the run")] = 35.0,
    steps: Annotated[int, typer.Option(help="length in steps instead of minutes")] = 0,
    threads: Annotated[int, typer.Option(help="torch threads")] = 4,
    documents: Annotated[int, typer.Option(help="task documents to make")] = 40_000,
    seed: Annotated[int, typer.Option()] = 0,
    induction: Annotated[float, typer.Option(help="strength of the hand-set copy head")] = 0.4,
    document_share: Annotated[float, typer.Option(help="rows of task documents")] = 0.36,
    label_smoothing: Annotated[float, typer.Option()] = 0.02,
    evaluate_every: Annotated[int, typer.Option(help="steps between evaluations")] = 500,
    resume: Annotated[bool, typer.Option(help="go on from OUT/state.pt")] = False,
    compile: Annotated[bool, typer.Option(help="use torch.compile (needs a C++ compiler)")] = True,
) -> None:
    """Make the data, train, and export a Hugging Face folder (also at every evaluation)."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    dataset = prepare_data(data or out / "data", out, seed, documents)
    model = TinyLlama(ModelConfig())
    set_induction_heads(model, induction, seed)
    config = TrainConfig(
        minutes=minutes,
        steps=steps,
        induction_strength=induction,
        document_share=document_share,
        label_smoothing=label_smoothing,
        seed=seed,
    )
    trainer = Trainer(model, dataset, config)
    state_path = out / "state.pt"
    if resume and state_path.exists():
        trainer.resume(torch.load(state_path, weights_only=False))
    forward = model
    if compile:
        forward = torch.compile(model, dynamic=False)
        trainer.warm_up(forward)
    with tqdm(total=1.0, disable=None, bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
        while trainer.progress < 1:
            loss = trainer.run_step(forward)
            if trainer.step % 20 == 0:
                bar.n = min(1.0, trainer.progress)
                speed = trainer.tokens / trainer.seconds
                bar.set_postfix_str(f"step {trainer.step} loss {loss:.3f} {speed:.0f} tokens/s")
            if trainer.step % evaluate_every == 0:
                bar.write(json.dumps({**trainer.evaluate(), "train": round(loss, 3)}))
                torch.save(trainer.state(), state_path)
                export(trainer, out)
    print(json.dumps(trainer.evaluate()))
    export(trainer, out)


if __name__ == "__main__":
    typer.run(main)
