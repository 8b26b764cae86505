"""The command `vllm-trie explore`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vllm_trie.command_errors import errors_end_the_command, in_a_folder
from vllm_trie.extras.traces.trace_file import Trace, read_trace
from vllm_trie.lab import local_engine, models
from vllm_trie.lab.explore.page import Beams, page

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PLAIN = "plain"
"""Decoding without drafts, in the place of a method."""


@app.command()
def explore(
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=in_a_folder, help="The HTML file to write.")
    ] = Path("explore.html"),
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Show this trace of a server's request; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or name of a model, or `smollm2`; the shipped one if left out."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to answer, or to continue if the model has no chat template."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Speculative method, or 'plain'; may be repeated. "
            "Left out: plain, ngram_trie and lookahead_trie."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes of a draft tree.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    beam_width: Annotated[
        int, typer.Option(min=0, max=64, help="Also show a beam search of this width.")
    ] = 0,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own messages.")] = False,
) -> None:
    """Write a page that shows a generation step by step: text, trees, time.

    Runs each method in an engine of its own, or reads traces that a server has written.
    """
    if trace:
        if any((prompt, method, beam_width)):
            raise typer.BadParameter(
                "shows what was recorded; leave --prompt, --method and --beam-width out",
                param_hint="--trace",
            )
        content = _page_of_files(trace, model)
    else:
        methods = method or [PLAIN, "ngram_trie", "lookahead_trie"]
        _check_methods(methods)
        local_engine.set_environment(verbose)
        content = _page_of_runs(
            model, prompt, methods, nodes, max_tokens, beam_width, verbose=verbose
        )
    output.write_text(content, encoding="utf-8")
    typer.echo(f"wrote {output}")


def _check_methods(methods: Sequence[str]) -> None:
    from vllm_trie.drafts import available_methods

    allowed = [PLAIN, *available_methods()]
    for method in methods:
        if method not in allowed or methods.count(method) > 1:
            raise typer.BadParameter(
                f"{method!r} is {'given twice' if method in allowed else 'no method'}; allowed, "
                f"once each: {', '.join(allowed)}",
                param_hint="--method",
            )


def _page_of_files(paths: Sequence[Path], model: str | None) -> str:
    try:
        traces = [read_trace(path) for path in paths]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from None
    path = models.model_or_shipped(model or traces[0].header.tokenizer)
    return page(traces, local_engine.load_tokenizer(path).decode)


def _page_of_runs(
    model: str | None,
    prompt: str | None,
    methods: Sequence[str],
    nodes: int,
    max_tokens: int,
    beam_width: int,
    verbose: bool,
) -> str:
    from vllm_trie.lab.tiny_model.chat_prompts import chat_prompts, prompt_tokens

    path = models.model_or_shipped(model)
    configs = {
        method: None if method == PLAIN else models.speculative_config(method, path, nodes)
        for method in methods
    }
    tokenizer = local_engine.load_tokenizer(path)
    token_ids = prompt_tokens(tokenizer, prompt or chat_prompts()[0].message)
    length = local_engine.checked_length(path, [token_ids], max_tokens, nodes)
    traces: list[Trace] = []
    beams: Beams | None = None
    with local_engine.silence(not verbose), tempfile.TemporaryDirectory() as folder:
        from vllm import SamplingParams

        from vllm_trie.lab.explore.record import record, record_beams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for method, config in configs.items():
            with local_engine.engine(
                path,
                max_model_len=length,
                max_num_seqs=1,
                speculative_config=config and {**config, "trace_path": folder},
            ) as llm:
                warm_up = SamplingParams(temperature=0.0, max_tokens=4)
                record(llm, method, token_ids, warm_up, Path(folder))
                traces.append(record(llm, method, token_ids, params, Path(folder)))
        if beam_width:
            with (
                local_engine.engine(
                    path, max_model_len=length, max_num_seqs=max(8, beam_width), block_size=32
                ) as llm,
                errors_end_the_command(),
            ):
                beams = record_beams(llm, beam_width, token_ids, max_tokens)
    return page(traces, tokenizer.decode, beams)
