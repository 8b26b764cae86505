"""``vllm-trie beam``: run a search, and draw it as a trie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_trie.beam.trace import SearchTrace
from vllm_trie.commands.shared import errors_end_the_command
from vllm_trie.lab.drawings.beam import draw_svg, draw_text
from vllm_trie.lab.local_engine import model_or_shipped

if TYPE_CHECKING:
    from vllm import LLM

app = typer.Typer(
    no_args_is_help=True,
    help="Run a beam search and draw it: which branches were kept, dropped and finished.",
)

_Svg = Annotated[Path | None, typer.Option(help="Write the trie as an SVG image to this file.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Write the search to this file.")]
_AllowGpu = Annotated[
    bool, typer.Option(help="Switch native beam search on for a GPU, where it has never run.")
]
_Dropped = Annotated[bool, typer.Option(help="Draw the candidates that were dropped, too.")]


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
    svg: _Svg = None,
    json_path: _Json = None,
    dropped: _Dropped = True,
    allow_untested_gpu: _AllowGpu = False,
) -> None:
    """Run one search in its own engine, and draw it."""
    options = {
        "beam_width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "beam_trace": True,
    }
    llm = _engine(
        model,
        allow_untested_gpu,
        max_num_seqs=max(width, 8),
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=1024,
    )
    from vllm import SamplingParams

    try:
        params = SamplingParams(n=width, temperature=0.0, max_tokens=max_tokens, extra_args=options)
        (result,) = llm.generate([prompt], params, use_tqdm=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    outputs: list[Any] = result.outputs
    if not hasattr(outputs[0], "beam"):
        typer.echo("native beam search is off; see `vllm-trie doctor`", err=True)
        raise typer.Exit(1)
    trace = SearchTrace.from_dict(outputs[0].beam["trace"])
    tokenizer = llm.get_tokenizer()
    texts = {token: tokenizer.decode([token]) for token in set(trace.token_ids)}
    if json_path is not None:
        saved = {"trace": trace.to_dict(), "token_texts": {str(k): v for k, v in texts.items()}}
        json_path.write_text(json.dumps(saved))
    for rank, output in enumerate(outputs, 1):
        typer.echo(f"#{rank}  {output.score:8.4f}  {output.text!r}")
    _show(trace, lambda token: texts[token], svg, dropped)


@app.command("check")
def check_here(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or name; the shipped one if left out.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=300, help="As of vLLM.")] = 1024,
    eager: Annotated[bool, typer.Option(help="Without compilation and CUDA graphs.")] = False,
    allow_untested_gpu: _AllowGpu = False,
) -> None:
    """Compare random searches with the same tokens computed as prompts, on this machine."""
    llm = _engine(
        model,
        allow_untested_gpu,
        max_num_seqs=32,
        enforce_eager=eager,
        max_model_len=max_model_len,
    )
    from vllm_trie.lab.check.beams import check

    with errors_end_the_command():
        result = check(llm)
    typer.echo(
        f"{result.num_hypotheses} hypotheses, {result.num_pairs} pairs with a common beginning: "
        f"log-probabilities differ by {result.found:.2g} per token from the same tokens as a "
        f"prompt; ordinary requests by {result.ordinary:.2g}, allowed is {result.allowed:.2g}"
    )
    if not result.passed:
        typer.echo(
            "WRONG: do not use native beam search here, and please report this with the output "
            "of `vllm-trie doctor`",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo("good")


@app.command()
def draw(
    search: Annotated[Path, typer.Argument(help="File that `run --json` has written.")],
    svg: _Svg = None,
    dropped: _Dropped = True,
) -> None:
    """Draw a search that was saved before."""
    try:
        saved = json.loads(search.read_text())
        trace = SearchTrace.from_dict(saved["trace"])
        texts: dict[str, str] = saved.get("token_texts", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise typer.BadParameter(f"{search}: {error}") from None
    _show(trace, lambda token: texts.get(str(token), f"<{token}>"), svg, dropped)


def _show(
    trace: SearchTrace, token_text: Callable[[int], str], svg: Path | None, dropped: bool
) -> None:
    typer.echo(draw_text(trace, token_text, dropped))
    if svg is not None:
        svg.write_text(draw_svg(trace, token_text, dropped))
        typer.echo(f"wrote {svg}")


def _engine(model: str | None, allow_untested_gpu: bool, **settings: Any) -> LLM:
    """Start an engine for a model, or for the shipped one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    additional = {"vllm_trie": {"allow_untested_gpu": True}} if allow_untested_gpu else {}
    return LLM(model_or_shipped(model), additional_config=additional, **settings)
