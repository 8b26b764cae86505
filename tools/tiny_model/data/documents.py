"""Task documents: a builder's material put into the words and the layout of a chat turn."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from tools.tiny_model.data.corpus import SourceFile
from tools.tiny_model.data.edits import EDITS, Edit
from tools.tiny_model.data.excerpts import IDENTIFIER, Excerpt, ExcerptSampler
from tools.tiny_model.data.questions import QUESTIONS, Question
from tools.tiny_model.data.tokenizer import END, render_turns

EXACT_KINDS: frozenset[str] = frozenset(EDITS) - {"add_docstrings", "fix_bug"} | {
    "parameters", "returned_value", "called_names", "count_functions", "uses_name", "find_passage",
}  # fmt: skip
"""Kinds whose right answer follows from the prompt alone."""

_WRAPPERS = (
    "{}", "{}.", "Please {}.", "please {}", "Can you {}?", "Could you {}?", "I want you to {}.",
    "Task: {}", "Now {}.", "{} please", "You should {}.", "{}:", "Instruction: {}.",
)  # fmt: skip
_SYSTEM_LINES = (
    "You are a helpful assistant.", "You are a coding assistant.", "Answer briefly.",
    "You are an expert Python programmer.", "Help the user with code.",
)  # fmt: skip
_LEAD_INS = (
    "This is my code:", "Look at this:", "Consider the following.", "I have this in my project:",
    "Someone gave me this.", "Here is what I have so far:", "We use this at work.", "Read this:",
    "Here is the file.", "I am reading this code:",
)  # fmt: skip
_CLASS_EDITS = frozenset(
    ("repeat", "rename", "remove_comments", "remove_docstrings", "add_docstrings", "outline",
     "fix_bug", "add_logging", "drop_function", "make_private", "reverse_order")
)  # fmt: skip
"""Edits that read the same when all the code stands in a class."""
_CONTEXT_FREE = ("write_function", "describe_known", "small_talk")
_FOLLOW_UPS = (
    "parameters", "returned_value", "called_names", "count_functions", "uses_name", "purpose",
    "rename", "outline", "show_function", "write_tests", "explain_calls", "add_logging",
)  # fmt: skip
"""Kinds that show the excerpt unchanged, and so may follow one another in a conversation."""


@dataclass(frozen=True)
class Document:
    """A prompt, ready for the tokenizer, and its answer, which ends with the END token."""

    kind: str
    prompt: str
    answer: str


def _phrase(instruction: str, rng: random.Random) -> str:
    text = rng.choice(_WRAPPERS).format(instruction)
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def _fence(code: str, language: str) -> str:
    return f"```{language}\n{code}\n```"


def _in_class(code: str, name: str) -> str:
    return f"class {name}:\n" + textwrap.indent(code, "    ")


def _place(
    request: str,
    context: str | None,
    path: str | None,
    fence: str | None,
    request_first: bool,
    lead_in: str | None,
) -> str:
    """The user's turn: request before or after the context, which may be fenced and have a path."""
    if context is None:
        return request
    block = context if fence is None else _fence(context, fence)
    if path is not None:
        block = f"# file: {path}\n{block}" if fence is None else f"{path}:\n{block}"
    if lead_in is not None:
        block = f"{lead_in}\n\n{block}"
    parts = (request, block) if request_first else (block, request)
    return "\n\n".join(parts)


class DocumentMaker:
    """Makes task documents from source files.

    Args:
        files: where the excerpts come from.
        names: identifiers to rename to and to invent classes from.
    """

    def __init__(self, files: Sequence[SourceFile], names: Sequence[str]) -> None:
        self._excerpts = ExcerptSampler(files)
        self._names = names
        table = {**EDITS, **QUESTIONS}
        self._kinds = list(table)
        self._weights = [weight for _, weight in table.values()]

    def make(self, rng: random.Random, max_chars: int, kind: str | None = None) -> Document:
        """One document of that (or any) kind whose context has at most ``max_chars`` characters."""
        while True:
            chosen = kind or rng.choices(self._kinds, self._weights)[0]
            # Try a few excerpts before another kind, or the kinds that rarely fit would vanish.
            for _ in range(12):
                drawn = self._draw(chosen, rng, max_chars)
                if drawn is not None:
                    break
            else:
                continue
            excerpt, material = drawn
            user, answer = self._lay_out(chosen, material, excerpt, rng)
            turns = [("user", user)]
            if chosen not in _CONTEXT_FREE and rng.random() < 0.12:
                # A second turn about the same code, which is not shown again.
                second = self._follow_up(chosen, excerpt, rng, max_chars)
                if second is not None:
                    turns += [("assistant", answer), ("user", second[1])]
                    chosen, answer = second[0], second[2]
            if rng.random() < 0.1:
                turns.insert(0, ("system", rng.choice(_SYSTEM_LINES)))
            return Document(chosen, render_turns(turns, add_generation_prompt=True), answer + END)

    def _draw(
        self, kind: str, rng: random.Random, max_chars: int, excerpt: Excerpt | None = None
    ) -> tuple[Excerpt, Edit | Question] | None:
        excerpt = excerpt or self._excerpts.draw(rng, max_chars)
        if excerpt is None:
            return None
        if kind in EDITS:
            material: Edit | Question | None = EDITS[kind][0](excerpt, rng, self._names)
        else:
            other = self._excerpts.draw(rng, max_chars)
            if other is None or other.path == excerpt.path:
                return None
            material = QUESTIONS[kind][0](excerpt, other, rng, self._names)
        return None if material is None else (excerpt, material)

    def _follow_up(
        self, first: str, excerpt: Excerpt, rng: random.Random, max_chars: int
    ) -> tuple[str, str, str] | None:
        """``(kind, request, answer)`` about code already shown unchanged."""
        kind = rng.choice(_FOLLOW_UPS)
        if first not in _FOLLOW_UPS or kind == first:
            return None
        drawn = self._draw(kind, rng, max_chars, excerpt)
        if drawn is None:
            return None
        material = drawn[1]
        if isinstance(material, Edit):
            return kind, _phrase(material.instruction, rng), material.answer.strip()
        return kind, material.question, material.answer.strip()

    def _lay_out(
        self, kind: str, material: Edit | Question, excerpt: Excerpt, rng: random.Random
    ) -> tuple[str, str]:
        """The user's turn and the answer."""
        fence = rng.choice(("python", "python", "")) if rng.random() < 0.35 else None
        if isinstance(material, Edit):
            request, context = _phrase(material.instruction, rng), material.shown
            is_code = kind != "explain_calls"
        else:
            request, context, is_code = material.question, material.context, material.is_code
            if kind in ("find_passage", "summarize_text"):
                fence = None
        answer = material.answer.strip()
        if excerpt.class_name and context and rng.random() < 0.4:
            if kind in _CLASS_EDITS:
                context = _in_class(context, excerpt.class_name)
                answer = _in_class(answer, excerpt.class_name)
            elif kind in _FOLLOW_UPS and not isinstance(material, Edit):
                context = _in_class(context, excerpt.class_name)
        if is_code and fence is not None:
            answer = _fence(answer, fence or "python")
        shown_path = excerpt.path if is_code and rng.random() < 0.3 else None
        request_first = rng.random() < 0.4
        if context is not None and not request_first and rng.random() < 0.2:
            context_line = rng.choice(_LEAD_INS)
        else:
            context_line = None
        user = _place(request, context, shown_path, fence, request_first, context_line)
        if context is None and is_code and fence is not None:
            # Nothing in the prompt is fenced: say so, or the fence would come by chance.
            user += " " + rng.choice(("Use a code block.", "Answer in a code block."))
        return user, answer


def usable_names(files: Sequence[SourceFile], limit: int = 6000) -> list[str]:
    """Lower-case identifiers of the files, in sorted order, thinned to ``limit``."""
    words = {
        word
        for file in files
        if not file.is_test
        for word in IDENTIFIER.findall(file.text)
        if 3 < len(word) < 14 and word.islower() and not word.startswith("_")
    }
    names = sorted(words)
    return names[:: max(1, len(names) // limit)]
