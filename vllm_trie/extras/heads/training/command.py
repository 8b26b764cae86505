"""`vllm-trie medusa`: train Medusa heads for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_trie.command_errors import errors_end_the_command

if TYPE_CHECKING:
    import numpy as np

    from vllm_trie.extras.heads.training import Backbone, Trainer

app = typer.Typer(no_args_is_help=True, help="Train Medusa heads for a model.")

STATE_FILE = "training-state.pt"
_CALIBRATION_ROWS = 16
"""A temperature is one number, which a few thousand places settle."""


@app.callback()
def _group() -> None:
    """Keep `train` a subcommand, which Typer would otherwise merge into a group of one."""


@app.command()
def train(
    model: Annotated[str, typer.Option(help="The model: a folder or a name. It stays frozen.")],
    data: Annotated[list[Path], typer.Option(help="Text files, .jsonl files or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the heads.")],
    validation: Annotated[
        list[Path] | None, typer.Option(help="Held-out text; default: the end of the data.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Number of heads, K.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 1,
    share_output: Annotated[
        bool, typer.Option(help="Use the model's own output layer and train the blocks alone.")
    ] = False,
    outputs: Annotated[
        int,
        typer.Option(min=0, help="Guess only this many tokens, the data's most frequent; 0: all."),
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of text in a step.")] = 8,
    context: Annotated[int, typer.Option(min=16, help="Tokens in a row.")] = 512,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    device: Annotated[str, typer.Option(help="'cpu', 'cuda'; default: a GPU if there is.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the computation; weights stay float32.")] = "",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 100,
    seed: Annotated[int, typer.Option(help="Order of the rows.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run in OUT.")] = True,
) -> None:
    """Train heads on a frozen model from text files."""
    from vllm_trie.extras.heads.heads import HeadsShape
    from vllm_trie.extras.heads.training import TokenRows, Trainer, TrainingPlan
    from vllm_trie.extras.heads.training.states import StateCache

    with errors_end_the_command():
        backbone = _load_backbone(model, device, dtype, context)
        tokens, held = _read_text(backbone, data, validation, context)
        held_rows = TokenRows(held, context).batch(0, min(64, max(1, len(held) // context)))
        plan = TrainingPlan(steps, batch, lr, min(40, steps), 0.01, seed)
        shape = HeadsShape(
            num_heads=heads,
            num_layers=layers,
            hidden_size=backbone.hidden_size,
            vocab_size=backbone.vocab_size,
            num_outputs=min(outputs or backbone.vocab_size, backbone.vocab_size),
            shares_output=share_output,
        )
        out.mkdir(parents=True, exist_ok=True)
        rows = TokenRows(tokens, context, seed)
        cache = None
        if steps * batch > rows.num_rows:
            try:
                cache = StateCache(out, backbone, rows.rows)
            except OSError as error:
                typer.echo(
                    f"warning: --out {out} cannot keep hidden states ({error}), so each epoch "
                    "computes them again; free space there, or name an --out on another disk",
                    err=True,
                )
        trainer = Trainer(backbone, rows, plan, shape, cache)
        _run(trainer, out / STATE_FILE, resume, save_every, batch * context)
        scores = trainer.evaluate(held_rows)
        temperatures = trainer.fit_temperatures(held_rows[:_CALIBRATION_ROWS])
        _save(trainer, out, temperatures, scores, len(tokens))
        if cache is not None:
            cache.delete()
        _print_scores(scores, temperatures, f"{held_rows.size} held-out tokens")
        typer.echo(f"saved to {out}")


def _read_text(
    backbone: Backbone, data: list[Path], validation: list[Path] | None, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to train on and those to validate on."""
    from vllm_trie.extras.heads.training.text import find_files, read_tokens, split_rows

    tokens = read_tokens(find_files(data), backbone.encoder)
    if not validation:
        return split_rows(tokens, context, 0.02)
    return tokens, read_tokens(find_files(validation), backbone.encoder)


def _load_backbone(model: str, device: str, dtype: str, context: int) -> Backbone:
    import torch

    from vllm_trie.extras.heads.training import Backbone

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype}: allowed are float32, bfloat16 and float16")
    backbone = Backbone(model, device, getattr(torch, dtype))
    if backbone.max_length is not None and context > backbone.max_length:
        raise ValueError(f"--context {context}: the model takes at most {backbone.max_length}")
    return backbone


def _run(
    trainer: Trainer, state_path: Path, resume: bool, save_every: int, step_tokens: int
) -> None:
    import torch
    from tqdm import tqdm

    steps = trainer.plan.steps
    if resume and state_path.exists():
        try:
            trainer.resume(torch.load(state_path, map_location="cpu", weights_only=True))
        except ValueError as error:
            raise ValueError(f"{state_path}: {error}") from error
        left = "" if trainer.step < steps else ": nothing is left to train; --no-resume trains anew"
        typer.echo(f"resumed at step {trainer.step} of {steps}{left}")
    average: list[float] = []
    with tqdm(
        total=steps * step_tokens,
        initial=trainer.step * step_tokens,
        unit="token",
        unit_scale=True,
        desc="training heads",
        disable=None,  # where the output is no terminal
    ) as bar:
        while trainer.step < steps:
            losses = trainer.run_step()
            # A moving average: single batches differ too much to be read.
            average = [
                0.95 * old + 0.05 * new for old, new in zip(average or losses, losses, strict=True)
            ]
            bar.update(step_tokens)
            bar.set_postfix_str("loss " + " ".join(f"{loss:.2f}" for loss in average))
            if trainer.step % save_every == 0 or trainer.step == steps:
                # Never leave a half-written state behind.
                partial = state_path.with_suffix(".part")
                torch.save(trainer.state(), partial)
                partial.replace(state_path)


def _save(
    trainer: Trainer, out: Path, temperatures: tuple[float, ...], scores: list[Any], tokens: int
) -> None:
    from dataclasses import asdict

    from vllm_trie.extras.heads.training.writing import save_vllm

    save_vllm(trainer.heads, out, temperatures)
    report = {
        "plan": asdict(trainer.plan),
        "heads": asdict(trainer.heads.shape),
        "tokens_of_text": tokens,
        "held_out": [
            {name: round(value, 4) for name, value in score._asdict().items()} for score in scores
        ],
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _print_scores(scores: list[Any], temperatures: tuple[float, ...], where: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("head", "top-1", "top-5", "nats", "temperature", title=f"on {where}")
    for index, (score, temperature) in enumerate(zip(scores, temperatures, strict=True), 1):
        table.add_row(
            str(index),
            f"{score.top1:.1%}",
            f"{score.top5:.1%}",
            f"{score.nll:.3f}",
            f"{temperature:.2f}",
        )
    Console().print(table)
