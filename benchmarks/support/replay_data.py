"""Recorded answers in Spec-Bench's public formats, as token ids."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

SYSTEM_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
MULTI_TURN = "multi-turn"
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
QUESTIONS_VARIABLE = "SPEC_BENCH_QUESTIONS"
ANSWERS_VARIABLE = "SPEC_BENCH_ANSWERS"
VARIABLES = {"--questions": QUESTIONS_VARIABLE, "--answers": ANSWERS_VARIABLE}
"""Environment variables that name the two files without an option."""
DEFAULT_TOKENIZER = "mistral_common/data/tokenizer.model.v1"

SMOKE = Path(__file__).with_name("smoke")
SMOKE_FILES = {"questions": SMOKE / "questions.jsonl", "answers": SMOKE / "answers.jsonl"}
"""Three questions with answers that repeat parts of them, for `--smoke`."""


def add_file_option(parser: argparse.ArgumentParser, flag: str) -> None:
    """Add `--questions` or `--answers`; None without the option and its variable."""
    variable = VARIABLES[flag]
    parser.add_argument(
        flag,
        type=Path,
        default=os.environ.get(variable) or None,
        help=f"Spec-Bench's {flag[2:]}, JSONL; {variable} if left out",
    )


def add_replay_options(
    parser: argparse.ArgumentParser, methods: Collection[str] | None = None
) -> None:
    """Add the options of the benchmarks that replay recorded answers."""
    add_file_option(parser, "--questions")
    add_file_option(parser, "--answers")
    parser.add_argument(
        "--tokenizer",
        default=DEFAULT_TOKENIZER,
        help="of the recorded text: a SentencePiece file, or a Hugging Face tokenizer",
    )
    if methods is not None:
        parser.add_argument(
            "--method",
            dest="methods",
            nargs="+",
            action="extend",
            choices=methods,
            help="all if left out",
        )


def recordings_of(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Recording]:
    """Return the recordings that the command line names.

    Raises:
        SystemExit: It names none.
    """
    for flag, variable in VARIABLES.items():
        path = getattr(options, flag[2:])
        if path is None or not path.is_file():
            raise SystemExit(f"{flag}: {path} is no file; name one, or set {variable}")
    return list(read_recordings(options.questions, options.answers, tokenizer))


class Recording(NamedTuple):
    """One turn of a question with the answer of a model."""

    question_id: int
    category: str
    prompt: list[int]
    output: list[int]
    """The answer's tokens and EOS; empty where a model answers freely."""


class Tokenizer(NamedTuple):
    encode: Callable[[str, bool], list[int]]
    """Returns the token ids of a text, after BOS if the flag is set."""
    eos_token_id: int
    vocab_size: int
    chat: Callable[[list[dict[str, str]]], list[int]] | None = None
    """Returns the token ids of a conversation by the model's template; None without one."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load a SentencePiece file (`*.model*`), or a Hugging Face tokenizer's folder or name.

    The default is a file in the installed package mistral_common.
    """
    name = tokenizer_path(name)
    path = Path(name)
    if ".model" in path.name and path.is_file():
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(str(path))
        return Tokenizer(
            lambda text, with_bos: pieces.encode(text, add_bos=with_bos),
            pieces.eos_id(),
            pieces.vocab_size(),
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return Tokenizer(
        lambda text, with_bos: tokenizer(text, add_special_tokens=with_bos)["input_ids"],
        tokenizer.eos_token_id,
        len(tokenizer),
        (lambda messages: _render(tokenizer, messages)) if tokenizer.chat_template else None,
    )


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def tokenizer_path(name: str) -> str:
    """Return where a tokenizer is: the default's file in its package, any other name as it is."""
    if name != DEFAULT_TOKENIZER:
        return name
    package = find_spec("mistral_common")
    if package is None or package.origin is None:
        raise SystemExit(
            f"--tokenizer {name}: mistral_common is not installed; name another tokenizer"
        )
    return str(Path(package.origin).parent / "data" / "tokenizer.model.v1")


def read_recordings(questions: Path, answers: Path, tokenizer: Tokenizer) -> Iterator[Recording]:
    """Yield every turn of every question, in the order of the file.

    The prompt of a turn has the earlier turns and their recorded answers, by the tokenizer's chat
    template or, without one, by Vicuna's. Prompt and answer are encoded separately.
    """
    recorded = {row["question_id"]: row["choices"][0]["turns"] for row in read_lines(answers)}
    for question in read_lines(questions):
        category = category_of(question)
        if question["question_id"] not in recorded:
            raise SystemExit(f"--answers: no answer to question {question['question_id']}")
        text = SYSTEM_PROMPT
        messages: list[dict[str, str]] = []
        turns = zip(question["turns"], recorded[question["question_id"]], strict=True)
        for turn, answer in turns:
            text += f"USER: {turn} ASSISTANT: "
            messages.append({"role": "user", "content": turn})
            yield Recording(
                question["question_id"],
                category,
                tokenizer.encode(text, True)
                if tokenizer.chat is None
                else tokenizer.chat(messages),
                [*tokenizer.encode(answer, False), tokenizer.eos_token_id],
            )
            text += f"{answer}</s>"
            messages.append({"role": "assistant", "content": answer})


def category_of(question: dict) -> str:
    """Return a question's category among Spec-Bench's six; the file splits one of them up."""
    category: str = question["category"]
    return MULTI_TURN if category in MT_BENCH_CATEGORIES else category


def read_lines(path: Path) -> Iterator[dict]:
    """Yield the objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def choose(
    recordings: Sequence[Recording], per_category: int, categories: Sequence[str] | None
) -> list[Recording]:
    """Choose questions spread evenly over each category, category by category.

    All turns of a question stay together; questions with two turns count twice.

    Args:
        recordings: all turns, in the order of the file.
        per_category: about how many recordings of each category.
        categories: those wanted; None for all.
    """
    by_category: dict[str, dict[int, list[Recording]]] = defaultdict(dict)
    for recording in recordings:
        by_category[recording.category].setdefault(recording.question_id, []).append(recording)
    unknown = set(categories or ()) - set(by_category)
    if unknown:
        raise SystemExit(
            f"--categories {', '.join(sorted(unknown))}: there are {', '.join(by_category)}"
        )
    chosen: list[Recording] = []
    for category, by_question in by_category.items():
        if categories and category not in categories:
            continue
        turns = list(by_question.values())
        number = min(len(turns), max(1, per_category // len(turns[0])))
        for i in range(number):
            chosen += turns[i * len(turns) // number]
    return chosen
