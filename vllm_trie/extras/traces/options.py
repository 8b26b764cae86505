"""The option ``trace_path``: where traces are written."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class TraceOptions(BaseModel):
    """Options of traces; ``exclude`` keeps the place out of them."""

    trace_path: str | None = Field(
        default=None,
        exclude=True,
        description="An existing folder for traces, which requests ask for with speculation_trace.",
    )


def trace_path(engine_options: Any) -> str | None:
    """Return the folder that an engine's options name."""
    assert isinstance(engine_options, TraceOptions)
    return engine_options.trace_path
