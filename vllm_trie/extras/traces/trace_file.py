"""The trace of one generation: what was drafted, accepted and emitted in each step.

A trace file holds a JSON object a line: a :class:`Header`, the :class:`Step` s, and an
:class:`End`. It is bounded; a file without an end is that of an engine that was stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from vllm_trie.tree import TokenTree

MAX_STEPS = 10_000
"""Steps of a trace."""
MAX_BYTES = 8 << 20
"""Bytes of a trace."""
MAX_PROMPT = 2048
"""Tokens of the prompt's end that a trace keeps."""

_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_EndReason = Literal["complete", "steps", "bytes", "missing"]
NoDraft = Literal["", "prefill", "unknown", "budget", "pause", "limit", "failed", "dropped"]
"""Why a step verified no draft: it computed the prompt; no continuation is known; no candidate was
worth its time; drafting as a whole pauses; the request gets none (its limits or options, or the
engine did not ask); the drafter failed; the scheduler left the draft out."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def encoded(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


class Header(_Line):
    """The first line of a trace.

    Attributes:
        format, version: Of the file.
        request_id: The engine's.
        method: Of the speculation, or "plain".
        model, tokenizer: As the engine was given them.
        prompt: Token ids, the last :data:`MAX_PROMPT` of them.
        num_prompt_tokens: All of them.
        created: When the request began.
        options: Of the speculation, those that differ from their defaults.
        parts: Of earlier releases, whose drafters had parts; not read.
    """

    format: Literal["vllm-trie trace"]
    version: Literal[1]
    request_id: str = ""
    method: str
    model: str
    tokenizer: str
    prompt: list[_Token]
    num_prompt_tokens: int = Field(ge=0)
    created: datetime | None = None
    options: dict[str, JsonValue] = {}
    parts: list[str] = []

    @classmethod
    def of(
        cls,
        request_id: str,
        method: str,
        model: str,
        tokenizer: str,
        prompt: Sequence[int],
        options: Mapping[str, Any] | None = None,
    ) -> Header:
        """Return the header of a request with this prompt that begins now."""
        return cls(
            format="vllm-trie trace",
            version=1,
            request_id=request_id,
            method=method,
            model=model,
            tokenizer=tokenizer,
            prompt=list(prompt[-MAX_PROMPT:]),
            num_prompt_tokens=len(prompt),
            created=datetime.now(UTC).replace(microsecond=0),
            options=dict(options or {}),
        )


class Step(_Line):
    """One step that gave the request tokens.

    Attributes:
        seconds: Since the request's step before it, or since its start.
        tokens: New tokens: the accepted ones and the bonus token. Without the latter where the
            output ends inside the accepted path.
        nodes, parents: The verified tree, see :class:`~vllm_trie.tree.TokenTree`.
        probabilities: Predicted probability of each node; empty if the drafter gives none.
        never_accept: Nodes of a lookahead window.
        accepted: Nodes whose tokens were taken, root first.
        parts: As the header's.
        no_draft: Why there are no nodes.
    """

    seconds: float = Field(ge=0)
    tokens: list[_Token] = Field(min_length=1)
    nodes: list[_Token] = []
    parents: list[int] = []
    probabilities: list[float] = []
    never_accept: list[int] = []
    accepted: list[int] = []
    parts: list[int] = []
    no_draft: NoDraft = ""

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        accepted: Sequence[int],
        tokens: Sequence[int],
        seconds: float,
        no_draft: NoDraft = "",
    ) -> Step:
        """Return the step that verified `tree`; `tokens` may end inside the accepted path."""
        never = () if tree.never_accept is None else tree.never_accept.nonzero()[0].tolist()
        probabilities = () if tree.probabilities is None else tree.probabilities.tolist()
        return cls(
            seconds=round(seconds, 6),
            tokens=list(tokens),
            nodes=tree.token_list,
            parents=tree.parent_list,
            probabilities=[float(f"{value:.3g}") for value in probabilities],
            never_accept=list(never),
            accepted=list(accepted[: len(tokens)]),
            no_draft="" if tree.num_nodes else no_draft,
        )

    @model_validator(mode="after")
    def _check_tree(self) -> Step:
        count = len(self.nodes)
        if len(self.parents) != count or len(self.probabilities) not in (0, count):
            raise ValueError("nodes, parents and probabilities differ in length")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent does not come before its child")
        if any(not 0 <= node < count for node in (*self.accepted, *self.never_accept)):
            raise ValueError("accepted or never_accept names a node that does not exist")
        if [self.parents[node] for node in self.accepted] != [-1, *self.accepted][:-1]:
            raise ValueError("the accepted nodes are no path of the tree")
        if [self.nodes[node] for node in self.accepted] != self.tokens[: len(self.accepted)]:
            raise ValueError("the tokens are not those of the accepted nodes")
        return self


class End(_Line):
    """The last line of a trace.

    Attributes:
        end: "complete", or the bound that cut the trace.
    """

    end: _EndReason


class Trace(NamedTuple):
    """A trace that was read; `end` is "missing" where the file stops without one."""

    header: Header
    steps: list[Step]
    end: _EndReason


class TraceWriter:
    """Writes one bounded trace into a file opened for binary writing.

    Args:
        file: Receives the lines; the caller owns it.
        header: Of the trace.
    """

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._end: _EndReason = "complete"
        self._steps_left = MAX_STEPS
        line = header.encoded()
        self._bytes_left = MAX_BYTES - len(line) - len(End(end="complete").encoded())
        file.write(line)

    def add(self, step: Step) -> None:
        """Write a step, or none from the first on that does not fit."""
        if self._end != "complete":
            return
        line = step.encoded()
        if not self._steps_left:
            self._end = "steps"
        elif len(line) > self._bytes_left:
            self._end = "bytes"
        else:
            self._steps_left -= 1
            self._bytes_left -= len(line)
            self._file.write(line)

    def finish(self) -> None:
        """Write the end."""
        self._file.write(End(end=self._end).encoded())


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        ValueError: The file is no trace, or is damaged; names the line.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than a trace can be ({MAX_BYTES} bytes)")
    return parse_trace(content.splitlines(keepends=True), str(path))


def parse_trace(lines: Iterable[bytes], name: str) -> Trace:
    """Return the trace of a file's lines; a last line without its end is left out.

    Raises:
        ValueError: Naming the line.
    """
    header: Header | None = None
    end: _EndReason | None = None
    steps: list[Step] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            if end is not None:
                raise ValueError("it follows the end")
            if header is None:
                header = Header.model_validate_json(line)
            elif line.startswith(b'{"end"'):
                end = End.model_validate_json(line).end
            else:
                steps.append(Step.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            reason = f"{field}: {first['msg']}" if field else first["msg"]
            raise ValueError(f"{name}, line {number}, is no line of a trace: {reason}") from None
        except ValueError as error:
            raise ValueError(f"{name}, line {number}, is no line of a trace: {error}") from None
    if header is None:
        raise ValueError(f"{name} is empty; a trace begins with a header")
    return Trace(header, steps, end or "missing")
