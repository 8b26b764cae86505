"""Functions cut out of source files, the raw material of the task documents."""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import random
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.tiny_model.data.corpus import SourceFile

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Function:
    """A function's dedented source with the ``ast`` node parsed from exactly that source."""

    source: str
    node: FunctionNode

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def docstring(self) -> str | None:
        return ast.get_docstring(self.node)

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters but ``self`` and ``cls``, starred ones with their stars."""
        spec = self.node.args
        names = [a.arg for a in spec.posonlyargs + spec.args if a.arg not in ("self", "cls")]
        if spec.vararg:
            names.append("*" + spec.vararg.arg)
        names += [a.arg for a in spec.kwonlyargs]
        if spec.kwarg:
            names.append("**" + spec.kwarg.arg)
        return names

    @property
    def is_method(self) -> bool:
        first = (self.node.args.posonlyargs + self.node.args.args)[:1]
        return bool(first) and first[0].arg in ("self", "cls")

    @property
    def signature(self) -> str | None:
        """The lines from ``def`` to the colon, or None if the body starts on the same line."""
        body_line = self.node.body[0].lineno
        if body_line == self.node.lineno:
            return None
        lines = self.source.split("\n")[self.node.lineno - 1 : body_line - 1]
        while lines and not lines[-1].split("#")[0].rstrip().endswith(":"):
            lines.pop()
        return "\n".join(lines) or None


@dataclass(frozen=True)
class Excerpt:
    """Neighbouring functions of one file (or of one class in it)."""

    path: str
    class_name: str | None
    functions: tuple[Function, ...]

    @property
    def source(self) -> str:
        return join(f.source for f in self.functions)


def join(sources: Iterable[str]) -> str:
    return "\n\n".join(sources)


def parse_function(source: str) -> Function | None:
    """Parse dedented source that holds one function; None where it does not."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if len(body) != 1 or not isinstance(body[0], FunctionNode):
        return None
    return Function(source, body[0])


def function_groups(
    file: SourceFile, min_chars: int = 40, max_chars: int = 2200
) -> Iterator[tuple[str | None, list[str]]]:
    """Yield ``(class name or None, [dedented function sources])`` for a file's siblings."""
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = file.text.split("\n")

    def cut(node: FunctionNode) -> str:
        start = min([node.lineno] + [d.lineno for d in node.decorator_list])
        return textwrap.dedent("\n".join(lines[start - 1 : node.end_lineno]))

    def walk(body: list[ast.stmt], name: str | None) -> Iterator[tuple[str | None, list[str]]]:
        sources = [cut(node) for node in body if isinstance(node, FunctionNode)]
        sources = [source for source in sources if min_chars < len(source) < max_chars]
        if sources:
            yield name, sources
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, node.name)

    yield from walk(tree.body, None)


class ExcerptSampler:
    """Draws excerpts; large groups of functions more often, tests less often."""

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self._groups: list[tuple[str, str | None, list[str]]] = []
        weights = []
        for file in files:
            for class_name, sources in function_groups(file):
                self._groups.append((file.path, class_name, sources))
                weights.append(sum(map(len, sources)) ** 0.75 * (0.35 if file.is_test else 1.0))
        self._cumulative = list(itertools.accumulate(weights))

    def draw(self, rng: random.Random, max_chars: int) -> Excerpt | None:
        """One excerpt of at most ``max_chars`` characters, None if the draw did not fit."""
        at = bisect.bisect(self._cumulative, rng.random() * self._cumulative[-1])
        path, class_name, sources = self._groups[at]
        limit = rng.uniform(0.2, 1.0) * max_chars
        start, size, functions = rng.randrange(len(sources)), 0, []
        for source in sources[start : start + 16]:
            size += len(source)
            if size > (limit if functions else max_chars):
                break
            function = parse_function(source)
            if function is None:
                break
            functions.append(function)
        return Excerpt(path, class_name, tuple(functions)) if functions else None


def strip_comments(function: Function) -> str | None:
    """The source without its comments; lines that held nothing else go."""
    lines: list[str | None] = list(function.source.split("\n"))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(function.source).readline))
    except (tokenize.TokenError, SyntaxError):
        return None
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = (lines[row - 1] or "")[:column].rstrip() or None
    return "\n".join(line for line in lines if line is not None)


def strip_docstring(function: Function) -> str | None:
    """The source without its docstring, None where the docstring is all there is."""
    if function.docstring is None:
        return function.source
    first = function.node.body[0]
    if len(function.node.body) == 1 or first.lineno == function.node.lineno:
        return None
    lines = function.source.split("\n")
    end = first.end_lineno or first.lineno
    while end < len(lines) and not lines[end].strip():
        end += 1
    return "\n".join(lines[: first.lineno - 1] + lines[end:])


def first_sentence(text: str | None, max_chars: int = 120) -> str | None:
    """First sentence of a docstring as one line, None if there is none or it is long."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".:;, ")
    return sentence + "." if 8 < len(sentence) < max_chars else None
