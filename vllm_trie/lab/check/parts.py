"""The table of parts, and what passes between the command and their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from vllm_trie.drafts import available_methods

Status = Literal["passed", "failed", "not applicable"]
_METHODS = ("ngram_trie", "lookahead_trie", "trie_union", "medusa_dynamic")
METHODS = tuple(method for method in _METHODS if method in available_methods())


class Settings(BaseModel):
    """The options of one run."""

    model: str
    """Folder or name."""
    heads: str | None
    """Folder or name of Medusa heads for the model; None without."""
    quick: bool
    folder: Path
    """For files that pass from one part to later ones."""


class Outcome(BaseModel):
    """The findings of a part."""

    status: Status
    summary: str
    """One line for the table of results."""
    details: list[str] = []
    """Lines for the section below the table, in Markdown."""
    measured: dict[str, Any] = {}
    """Figures for the JSON file."""


class Part(BaseModel):
    """One row of the table."""

    name: str
    work: str
    """``module:function`` of this package; takes the settings and `arguments`, returns an
    :class:`Outcome`."""
    arguments: dict[str, str] = {}
    needs: str | None = None
    """A part whose failure makes this one impossible."""
    allows: str | None = None
    """What is safe on this device once the part has passed, in Markdown."""


def all_parts(quick: bool, dtypes: list[str]) -> list[Part]:
    """Return the parts of a run, in the order in which they run: cheap ones first."""
    table = [
        Part(name="versions and device", work="doctor:describe"),
        Part(name="attention kernel", work="kernels:check_attention"),
        Part(name="CUDA graphs", work="kernels:check_graphs"),
    ]
    for dtype in dtypes:
        plain = f"plain vLLM, {dtype}"
        table.append(Part(name=plain, work="identity:decode_plainly", arguments={"dtype": dtype}))
        for method in METHODS[:1] if quick else METHODS:
            for verification in ("tree", "chain"):
                options = f'"method": "{method}", "verification": "{verification}"'
                table.append(
                    Part(
                        name=f"{method}, {verification}s, {dtype}",
                        work="identity:compare_method",
                        arguments={"dtype": dtype, "method": method, "verification": verification},
                        needs=plain,
                        allows=f"`speculative_config={{{options}}}` with `dtype={dtype}`",
                    )
                )
        table.append(
            Part(
                name=f"beam search, {dtype}",
                work="beams:check_beams",
                arguments={"dtype": dtype},
                allows=f"native beam search with `dtype={dtype}`",
            )
        )
    return [*table, Part(name="speed", work="speed:measure", arguments={"dtype": dtypes[-1]})]
