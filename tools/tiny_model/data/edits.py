"""Tasks whose answer is the excerpt's code, changed: rename, strip, fix, wrap, ...

Each builder takes an excerpt and returns an :class:`Edit` or None where the excerpt does not lend
itself to the task. The answers are made by program, so they are right by construction.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.tiny_model.data.excerpts import (
    IDENTIFIER,
    Excerpt,
    Function,
    join,
    strip_comments,
    strip_docstring,
)

_RESERVED = frozenset(keyword.kwlist) | set(dir(builtins)) | {"self", "cls"}


@dataclass(frozen=True)
class Edit:
    """What is asked (a phrase in the imperative), the code shown and the code expected."""

    instruction: str
    shown: str
    answer: str


Names = Sequence[str]
Builder = Callable[[Excerpt, random.Random, Names], Edit | None]


def _joined(parts: list[str | None]) -> str | None:
    return None if None in parts else join(part for part in parts if part)


def repeat(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    phrases = (
        "repeat the code", "copy the code", "write the same code again", "print the code unchanged",
        "give me this code back exactly as it is", "echo the snippet",
    )  # fmt: skip
    return Edit(rng.choice(phrases), excerpt.source, excerpt.source)


def rename(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """Rename one identifier; every whole-word occurrence changes, in comments too."""
    source = excerpt.source
    counts = Counter(w for w in IDENTIFIER.findall(source) if len(w) > 2 and w not in _RESERVED)
    often = sorted(word for word, count in counts.items() if count >= 2)
    if not often:
        return None
    old = rng.choice(often)
    new = rng.choice(
        [rng.choice(names), f"new_{old}", f"{old}_value", f"_{old}", rng.choice(names)]
    )
    if new == old or new in source:
        return None
    phrases = (
        "rename `{0}` to `{1}`", "replace `{0}` with `{1}`", "change the name `{0}` to `{1}`",
        "use the name `{1}` instead of `{0}`", "refactor: rename `{0}` to `{1}`",
        "call it `{1}` rather than `{0}`", "rename the identifier `{0}` to `{1}` everywhere",
    )  # fmt: skip
    answer = re.sub(rf"\b{old}\b", new, source)
    return Edit(rng.choice(phrases).format(old, new), source, answer)


def remove_comments(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    phrases = (
        "remove the comments", "delete all comments", "strip the comments from this code",
        "write the code without comments",
    )  # fmt: skip
    return _stripped(excerpt, strip_comments, rng, phrases)


def remove_docstrings(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    phrases = (
        "remove the docstrings", "delete every docstring", "strip the docstrings",
        "write the code without docstrings",
    )  # fmt: skip
    return _stripped(excerpt, strip_docstring, rng, phrases)


def _stripped(
    excerpt: Excerpt,
    strip: Callable[[Function], str | None],
    rng: random.Random,
    phrases: Sequence[str],
) -> Edit | None:
    """The edit that `strip` makes of each function; None if it changes nothing or fails."""
    answer = _joined([strip(f) for f in excerpt.functions])
    if answer is None or answer == excerpt.source:
        return None
    return Edit(rng.choice(phrases), excerpt.source, answer)


def add_docstrings(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """The answer's docstrings are the author's own: the model has to make them up."""
    shown = _joined([strip_docstring(f) for f in excerpt.functions])
    if shown is None or shown == excerpt.source:
        return None
    phrases = (
        "add docstrings", "document the functions", "write docstrings for this code",
        "add a docstring to each function",
    )  # fmt: skip
    return Edit(rng.choice(phrases), shown, excerpt.source)


def outline(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    signatures = [f.signature for f in excerpt.functions]
    if None in signatures:
        return None
    phrases = (
        "outline the code", "show only the signatures", "give the signatures of the functions",
        "replace each body with `...`", "make a stub file of this",
    )  # fmt: skip
    answer = "\n\n".join(f"{signature}\n    ..." for signature in signatures)
    return Edit(rng.choice(phrases), excerpt.source, answer)


_SWAPS = tuple(
    pair
    for one, other in (
        (" == ", " != "), (" is None", " is not None"), (" + ", " - "), (" and ", " or "),
        (" < ", " > "), (" in ", " not in "), ("True", "False"), ("+= ", "-= "), ("min(", "max("),
    )
    for pair in ((one, other), (other, one))
)  # fmt: skip


def fix_bug(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """Seed one bug, a swapped operator or a misspelt name, and ask for the original."""
    source = excerpt.source
    if rng.random() < 0.4:
        spots = [
            (match.start(), old, new)
            for old, new in _SWAPS
            for match in re.finditer(re.escape(old), source)
        ]
        if not spots:
            return None
        at, old, new = rng.choice(spots)
        shown = source[:at] + new + source[at + len(old) :]
    else:
        counts = Counter(IDENTIFIER.findall(source))
        matches = [m for m in IDENTIFIER.finditer(source) if len(m[0]) > 4 and counts[m[0]] > 1]
        if not matches:
            return None
        match = rng.choice(matches)
        word, at = match[0], rng.randrange(1, len(match[0]) - 2)
        misspelt = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        shown = source[: match.start()] + misspelt + source[match.end() :]
    if shown == source:
        return None
    phrases = (
        "fix the bug", "find and fix the mistake", "correct the code", "repair this code",
        "this does not work, fix it", "there is an error in this code, correct it",
    )  # fmt: skip
    return Edit(rng.choice(phrases), shown, source)


def add_logging(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """Insert one call as the first statement after the docstring of every function."""
    call = rng.choice(("print", "log.debug", "logger.info", "logging.info", "trace"))
    changed = []
    for function in excerpt.functions:
        body = function.node.body
        if body[0].lineno == function.node.lineno:
            return None
        first = body[1] if function.docstring is not None and len(body) > 1 else body[0]
        if first is body[0] and function.docstring is not None:
            return None
        at = min([first.lineno] + [d.lineno for d in getattr(first, "decorator_list", [])])
        lines = function.source.split("\n")
        lines.insert(at - 1, " " * first.col_offset + f'{call}("{function.name}")')
        changed.append("\n".join(lines))
    phrases = (
        "add a `{0}` call with its name to every function", "log each function with `{0}`",
        'start every function with `{0}("<its name>")`', "insert `{0}` at the top of each function",
    )  # fmt: skip
    return Edit(rng.choice(phrases).format(call), excerpt.source, join(changed))


def show_function(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    found = [f.name for f in excerpt.functions]
    if len(found) < 2 or len(set(found)) < len(found):
        return None
    function = rng.choice(excerpt.functions)
    phrases = (
        "show the function `{0}`", "print only `{0}`", "show me `{0}`", "extract `{0}`",
        "copy the definition of `{0}`", "what does the definition of `{0}` look like? show it",
    )  # fmt: skip
    return Edit(rng.choice(phrases).format(function.name), excerpt.source, function.source)


def drop_function(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """The twin of :func:`show_function`: part of the context must not be copied."""
    found = [f.name for f in excerpt.functions]
    if len(found) < 2 or len(set(found)) < len(found):
        return None
    gone = rng.choice(found)
    phrases = ("remove the function `{0}`", "delete `{0}`", "drop `{0}` and keep the rest")
    kept = join(f.source for f in excerpt.functions if f.name != gone)
    return Edit(rng.choice(phrases).format(gone), excerpt.source, kept)


def make_private(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    source = excerpt.source
    attributes = sorted(set(re.findall(r"self\.([a-z]\w+)\b", source)))
    if not attributes:
        return None
    name = rng.choice(attributes)
    phrases = (
        "make `self.{0}` private", "make the attribute `{0}` private",
        "put an underscore before the attribute `{0}`",
    )  # fmt: skip
    answer = re.sub(rf"\bself\.{name}\b", f"self._{name}", source)
    return Edit(rng.choice(phrases).format(name), source, answer)


def reverse_order(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    if len(excerpt.functions) < 2:
        return None
    phrases = (
        "write the functions in reverse order", "reverse the order of the functions",
        "put the last function first and the first last",
    )  # fmt: skip
    answer = join(f.source for f in reversed(excerpt.functions))
    return Edit(rng.choice(phrases), excerpt.source, answer)


def wrap_in_class(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """Move plain functions into a class; each gets ``self``."""
    methods = []
    for function in excerpt.functions:
        if function.is_method or '"""' in function.source or "@" in function.source:
            return None
        first = "self, " if function.parameters else "self"
        methods.append(re.sub(r"def \w+\(", lambda m, f=first: m[0] + f, function.source, count=1))
    name = rng.choice(names).strip("_").title().replace("_", "")
    phrases = (
        "move the functions into a class `{0}`", "wrap this in a class called `{0}`",
        "turn the functions into methods of a class `{0}`", "make a class `{0}` of it",
    )  # fmt: skip
    answer = f"class {name}:\n" + textwrap.indent(join(methods), "    ")
    return Edit(rng.choice(phrases).format(name), excerpt.source, answer)


def write_tests(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    tests = []
    for function in excerpt.functions:
        owner = "self.object." if function.is_method else ""
        arguments = ", ".join(p.lstrip("*") for p in function.parameters)
        tests.append(
            f"def test_{function.name.strip('_')}(self):\n"
            f"    result = {owner}{function.name}({arguments})\n"
            "    self.assertIsNotNone(result)"
        )
    phrases = (
        "write tests", "write unit tests for this code", "add a test for each function",
        "how would you test this? write the tests",
    )  # fmt: skip
    return Edit(rng.choice(phrases), excerpt.source, join(tests))


def explain_calls(excerpt: Excerpt, rng: random.Random, names: Names) -> Edit | None:
    """A summary in comments: signature, first calls, last returned expression."""
    lines = []
    for function in excerpt.functions:
        line = f"# {function.name}({', '.join(function.parameters)})"
        calls: list[str] = []
        returned = None
        for node in ast.walk(function.node):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                if len(text) < 40 and "\n" not in text and text not in calls:
                    calls.append(text)
            elif isinstance(node, ast.Return) and node.value is not None:
                text = ast.unparse(node.value)
                returned = text if len(text) < 60 and "\n" not in text else returned
        if calls:
            line += f"\n#   calls {', '.join(calls[:4])}"
        if returned:
            line += f"\n#   returns {returned}"
        lines.append(line)
    phrases = (
        "summarize the code", "summarize each function in comments", "explain the code",
        "give a short summary of these functions",
    )  # fmt: skip
    return Edit(rng.choice(phrases), excerpt.source, "\n".join(lines))


EDITS: dict[str, tuple[Builder, float]] = {
    "repeat": (repeat, 1.5),
    "rename": (rename, 4.0),
    "remove_comments": (remove_comments, 1.5),
    "remove_docstrings": (remove_docstrings, 1.5),
    "add_docstrings": (add_docstrings, 2.0),
    "outline": (outline, 2.0),
    "fix_bug": (fix_bug, 3.0),
    "add_logging": (add_logging, 2.0),
    "show_function": (show_function, 2.5),
    "drop_function": (drop_function, 1.5),
    "make_private": (make_private, 1.5),
    "reverse_order": (reverse_order, 1.5),
    "wrap_in_class": (wrap_in_class, 1.5),
    "write_tests": (write_tests, 2.0),
    "explain_calls": (explain_calls, 2.5),
}
"""Builders by kind, each with its sampling weight."""
