"""``vllm-trie beam``: run a search, and draw it as a trie."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from vllm_trie.lab.drawings.beam import draw_text
from vllm_trie.lab.models import model_or_shipped
from vllm_trie.searches.trace import SearchTrace

app = typer.Typer(
    no_args_is_help=True,
    help="Run a beam search and draw it: which branches were kept, dropped and finished.",
)


@app.callback()
def beam() -> None:
    pass  # keeps a group of one command a group


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder or name; the shipped one if left out.")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Beam width.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest hypothesis, tokens.")] = 8,
    length_penalty: Annotated[float, typer.Option(help="Exponent of the length.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(help="true, false or never.")] = "false",
    dropped: Annotated[
        bool, typer.Option(help="Draw the candidates that were dropped, too.")
    ] = True,
) -> None:
    """Run one search in its own engine, and draw it."""
    options = {
        "beam_width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "beam_trace": True,
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model_or_shipped(model),
        max_num_seqs=max(width, 8),
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=1024,
    )
    try:
        params = SamplingParams(n=width, temperature=0.0, max_tokens=max_tokens, extra_args=options)
        (result,) = llm.generate([prompt], params, use_tqdm=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    outputs: list[Any] = result.outputs
    if not hasattr(outputs[0], "beam"):
        typer.echo("native beam search is off; see `vllm-trie doctor`", err=True)
        raise typer.Exit(1)
    trace = SearchTrace(**outputs[0].beam["trace"])
    tokenizer = llm.get_tokenizer()
    for rank, output in enumerate(outputs, 1):
        typer.echo(f"#{rank}  {output.score:8.4f}  {output.text!r}")
    typer.echo(draw_text(trace, lambda token: tokenizer.decode([token]), dropped))
