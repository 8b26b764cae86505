"""The command `vllm-trie corpus synthesize`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_trie.extras.corpus.corpus_file import CorpusHeader, write_corpus
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer
from vllm_trie.lab import local_engine
from vllm_trie.lab.corpus import held_out, synthesis
from vllm_trie.lab.corpus.answers_file import AnswersFile
from vllm_trie.lab.corpus.prompt_format import PromptFormat, prompt_format
from vllm_trie.lab.corpus.synthesis import Completion, Plan

_SECONDS_BETWEEN_LINES = 30.0


class LocalEngine:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]
    ) -> Iterator[Completion]:
        """Yield each completion as soon as it is whole."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for index, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
            self._engine.add_request(
                str(index),
                {"prompt_token_ids": list(prompt)},
                SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY),
            )
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    [completion] = output.outputs
                    yield Completion(
                        # vLLM appends a random part to each id.
                        int(output.request_id.split("-")[0]),
                        list(completion.token_ids),
                        completion.text,
                        completion.finish_reason == "stop",
                    )


def run(
    model: str,
    output: Path,
    plan: Plan,
    prompts: Path | None,
    batch_size: int,
    engine_args: dict[str, object],
) -> CorpusHeader:
    """Synthesize answers next to `output`, say what a held-out tenth gains, write the corpus.

    Raises:
        ValueError: A setting or a file cannot be used.
    """
    questions = None if prompts is None else synthesis.read_questions(prompts)
    of_model = local_engine.loading_options(engine_args)
    loaded = load_tokenizer(model, **of_model)
    tokenizer = fingerprint(loaded.vocabulary)
    answers = AnswersFile(
        output.with_name(output.name + ".answers.jsonl"),
        {
            "model": model,
            "tokenizer": tokenizer,
            "prompts": None if questions is None else _digest(questions),
            **{
                n: v
                for n, v in plan._asdict().items()
                if n not in ("num_tokens", "questions_at_once")
            },
        },
    )
    typer.echo(f"{answers.path}: {answers.num_tokens:,} of {plan.num_tokens:,} tokens", err=True)
    local_engine.set_environment(
        verbose=False,
        defaults={n: v for n, v in local_engine.ENVIRONMENT.items() if n != "OMP_NUM_THREADS"},
    )
    from transformers import AutoTokenizer

    chat = prompt_format(AutoTokenizer.from_pretrained(model, **of_model))
    if answers.num_tokens < plan.num_tokens:
        config = local_engine.text_config(model, **of_model)
        settings = _engine_settings(config, chat, plan, questions, batch_size) | engine_args
        with local_engine.engine(model, **settings) as llm:
            _synthesize(LocalEngine(llm), chat, plan, answers, questions)
    if answers.num_tokens < plan.num_tokens:
        typer.echo(
            f"the questions of {prompts} gave {answers.num_tokens:,} tokens; name more of them, or "
            "leave --prompts out to let the model write its own",
            err=True,
        )
    gain = held_out.measure(answers.answers, chat, loaded.vocab_size)
    if gain is not None:
        typer.echo(
            f"tokens per step on {gain.num_answers} held-out answers, {held_out.NODES} nodes: "
            f"{gain.without:.2f} without the corpus, {gain.with_corpus:.2f} with it"
        )
    documents = (answer.tokens for answer in answers.answers)
    return write_corpus(output, documents, loaded.vocab_size, tokenizer)


def _engine_settings(
    config: Any,
    chat: PromptFormat,
    plan: Plan,
    questions: Sequence[str] | None,
    batch_size: int,
) -> dict[str, Any]:
    """Return the engine's options; leave out questions that are too long for the model."""
    longest = len(chat.answer_prompt("")) + 2 * plan.question_tokens
    if questions is not None:
        longest = max(len(chat.answer_prompt(question)) for question in questions)
    length = longest + plan.answer_tokens + 1
    limit = getattr(config, "max_position_embeddings", None) or length
    if length > limit:
        raise ValueError(
            f"the longest question and its answer take {length} tokens, the model's limit is "
            f"{limit}; shorten the questions, or lower --answer-tokens or --question-tokens"
        )
    import torch

    return {
        "dtype": "auto",
        "enforce_eager": not torch.cuda.is_available(),
        "max_model_len": length,
        "max_num_seqs": batch_size,
        # vLLM 0.32 on CPUs ends with an error where a seeded request's prompt is computed in parts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, length),
    }


def _synthesize(
    engine: LocalEngine,
    chat: PromptFormat,
    plan: Plan,
    answers: AnswersFile,
    questions: Sequence[str] | None,
) -> None:
    """Run the synthesis with a progress bar, or a line now and then without a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        BarColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s,"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    begin = last = time.monotonic()
    before = answers.num_tokens
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=plan.num_tokens, completed=before, speed=0.0)

        def report() -> None:
            nonlocal last
            now = time.monotonic()
            speed = (answers.num_tokens - before) / (now - begin)
            progress.update(bar, completed=min(answers.num_tokens, plan.num_tokens), speed=speed)
            if not console.is_terminal and now - last > _SECONDS_BETWEEN_LINES:
                last = now
                minutes = max(0, plan.num_tokens - answers.num_tokens) / speed / 60
                typer.echo(
                    f"{answers.num_tokens:,} of {plan.num_tokens:,} tokens, {speed:.0f} tokens/s, "
                    f"{minutes:.0f} min left",
                    err=True,
                )

        synthesis.synthesize(engine, chat, plan, answers, questions, report)


def _digest(questions: Sequence[str]) -> str:
    return sha256(json.dumps(questions).encode()).hexdigest()[:16]
