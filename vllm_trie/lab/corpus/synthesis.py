"""A model's own answers to questions that it wrote itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_trie.lab import local_engine
from vllm_trie.lab.corpus.answers_file import Answer, AnswersFile
from vllm_trie.lab.corpus.prompt_format import PromptFormat

OPENING_TOKENS = 24
"""Tokens of a text that a base model begins at random, and then continues."""
_SEEDS_APART = 1_000_003


class Completion(NamedTuple):
    """A continued prompt."""

    prompt: int
    """Its index."""
    token_ids: list[int]
    text: str
    ended: bool
    """Whether the model ended it, rather than the limit."""


class Engine(Protocol):
    """Continues prompts in full batches."""

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, object]]
    ) -> Iterator[Completion]:
        """Yield each completion as soon as it is whole; `params` are vLLM's sampling parameters."""
        ...


class Plan(NamedTuple):
    """Settings of a synthesis."""

    num_tokens: int
    """Tokens of all answers together; the last batch may exceed it."""
    temperature: float
    question_tokens: int
    answer_tokens: int
    """Longest question and answer. A chat's question that reaches the limit is dropped."""
    seed: int
    questions_at_once: int


def synthesize(
    engine: Engine,
    prompts: PromptFormat,
    plan: Plan,
    answers: AnswersFile,
    questions: Sequence[str] | None = None,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Add answers to the file until it has the planned number of tokens.

    Args:
        engine: Runs the model.
        prompts: Format of its prompts.
        plan: Settings.
        answers: Where the answers go; those in it count.
        questions: The user's; None to let the model write them. If they run out, the file ends up
            with fewer tokens.
        report: Called after each answer.

    Raises:
        ValueError: The model writes no question, or none that is new.
    """
    asked = {answer.question for answer in answers.answers}
    batches: Iterator[Sequence[tuple[int, str]]]
    if questions is None:
        batches = _own_questions(engine, prompts, plan, answers.next_number)
    else:
        left = [(i, text) for i, text in enumerate(questions) if text not in asked]
        batches = iter(local_engine.batches(left, plan.questions_at_once))
    while answers.num_tokens < plan.num_tokens and (batch := next(batches, None)):
        fresh = {text: index for index, text in batch if text not in asked}
        if not fresh:
            raise ValueError(
                f"the model writes no new questions after {answers.num_tokens} tokens of answers; "
                "name your own with --prompts"
            )
        asked.update(fresh)
        for answer in _answer(engine, prompts, plan, [(i, text) for text, i in fresh.items()]):
            answers.add(answer)
            report()


def _own_questions(
    engine: Engine, prompts: PromptFormat, plan: Plan, first: int
) -> Iterator[list[tuple[int, str]]]:
    """Yield batches of questions that the model writes, without end.

    Raises:
        ValueError: The model ended none of a batch.
    """
    for start in itertools.count(first, plan.questions_at_once):
        written = list(_write_questions(engine, prompts, plan, start))
        if not written:
            raise ValueError(
                f"none of {plan.questions_at_once} questions that the model wrote ended within "
                f"{plan.question_tokens} tokens; raise --question-tokens, or name your own "
                "questions with --prompts"
            )
        yield written


def _write_questions(
    engine: Engine, prompts: PromptFormat, plan: Plan, first: int
) -> Iterator[tuple[int, str]]:
    """Yield the questions of one batch that the model ended, with their numbers from `first` on."""
    indices = range(first, first + plan.questions_at_once)
    limit = plan.question_tokens if prompts.is_chat else OPENING_TOKENS
    params = [
        {
            **prompts.question_ends,
            "temperature": 1.0,
            "max_tokens": limit,
            "seed": plan.seed * _SEEDS_APART + index,
        }
        for index in indices
    ]
    written = engine.complete([prompts.question_prompt] * len(indices), params)
    for completion in sorted(written):
        question = completion.text.strip() if prompts.is_chat else completion.text
        if question.strip() and (completion.ended or not prompts.is_chat):
            yield indices[completion.prompt], question


def _answer(
    engine: Engine, prompts: PromptFormat, plan: Plan, questions: Sequence[tuple[int, str]]
) -> Iterator[Answer]:
    params: list[dict[str, object]] = [
        {
            "temperature": plan.temperature,
            "max_tokens": plan.answer_tokens,
            "seed": plan.seed * _SEEDS_APART + index,
        }
        for index, _ in questions
    ]
    texts = [prompts.answer_prompt(question) for _, question in questions]
    for completion in engine.complete(texts, params):
        if completion.token_ids:
            yield Answer(*questions[completion.prompt], completion.token_ids)


def read_questions(path: Path) -> list[str]:
    """Return the user's questions: a line each, or of *.jsonl the field 'prompt', 'question',
    'text', or the first of 'turns'.

    Raises:
        ValueError: The file is not UTF-8, or has no question, or a line without one.
    """
    try:
        lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is not UTF-8 text: {error}") from None
    is_jsonl = path.suffix == ".jsonl"
    questions = [
        _question(line, f"{path}, line {number}") if is_jsonl else line
        for number, line in lines
        if line.strip()
    ]
    if not questions:
        raise ValueError(f"--prompts {path}: no question in it; write one a line")
    return list(dict.fromkeys(questions))


def _question(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    fields = row if isinstance(row, dict) else {}
    turns = fields.get("turns")
    first_turn = turns[0] if isinstance(turns, list) and turns else None
    values = (*(fields.get(name) for name in ("prompt", "question", "text")), first_turn)
    for value in values:
        if isinstance(value, str) and value.strip():
            return value
    raise ValueError(f"{where} has none of the fields 'prompt', 'question', 'text' and 'turns'")
