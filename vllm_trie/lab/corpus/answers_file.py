"""Synthesized answers as a JSONL file, to which a run that goes on adds.

The first line holds the settings. Each other line is an answer; one that was cut off when a run was
killed is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    """A question and the model's answer."""

    number: int
    """The number of the question, in the order of their seeds or of the user's file."""
    question: str
    token_ids: list[int]
    """The answer's, with the token that ended the answer, if one did."""

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.token_ids, dtype=np.int32)


class AnswersFile:
    """The answers of one run and of those before it with the same settings.

    Attributes:
        answers: All of them.
        num_tokens: In all answers.
        next_number: Of the first question that was not asked yet.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        """Read a file, or begin one.

        Raises:
            ValueError: The file is of other settings, or not of this kind.
        """
        self.path = path
        self.answers: list[Answer] = []
        if path.exists():
            self.answers = list(self._read(settings))
        else:
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        self.num_tokens = sum(len(answer.token_ids) for answer in self.answers)
        self.next_number = 1 + max((answer.number for answer in self.answers), default=-1)

    def add(self, answer: Answer) -> None:
        """Append an answer; it is in the file when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(answer._asdict()) + "\n")
        self.answers.append(answer)
        self.num_tokens += len(answer.token_ids)
        self.next_number = max(self.next_number, answer.number + 1)

    def _read(self, settings: dict[str, object]) -> Iterator[Answer]:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        try:
            first, *lines = content[:whole].decode().splitlines()
            written = json.loads(first)["settings"]
            answers = [Answer(**json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} is not a file of synthesized answers ({error!r}); move it away, or "
                "name another --output"
            ) from None
        changed = [name for name in settings if written.get(name) != settings[name]]
        if changed:
            values = ", ".join(f"{n} {written.get(n)!r}, now {settings[n]!r}" for n in changed)
            raise ValueError(
                f"{self.path} holds answers of other settings ({values}); use the same, move the "
                "file away, or name another --output"
            )
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        yield from answers
