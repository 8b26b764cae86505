"""The report: a model for JSON, and Markdown that can be pasted into an issue."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, computed_field

from vllm_trie.lab.check.parts import Outcome, Part

BEFORE_OTHERS = ("attention kernel", "CUDA graphs")
"""Parts without which nothing is safe on a GPU."""
MARKS = {"passed": "passed", "failed": "**FAILED**", "not applicable": "not applicable"}
_MAX_CELL = 300


class PartReport(Outcome):
    """The outcome of a part."""

    name: str
    seconds: float
    log: tuple[str, ...] = ()
    """The end of its log, if it failed."""


class Report(BaseModel):
    """Everything that the command writes."""

    command: str
    model: str
    started: datetime
    finished: bool = False
    """False while parts are still to come."""
    parts: list[PartReport] = []
    safe: list[str] = []
    """Options that are safe on this device, in Markdown; empty if a part failed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether all parts ran and none failed."""
        return self.finished and all(part.status != "failed" for part in self.parts)

    def markdown(self) -> str:
        """Return the report as text."""
        verdict = "passed" if self.passed else "FAILED"
        date = f"{self.started:%Y-%m-%d %H:%M} UTC"
        lines = [f"# vllm-trie validate: {verdict}", "", f"`{self.command}`, {date}", ""]
        lines += ["| part | result | seconds | what was found |", "| --- | --- | ---: | --- |"]
        for part in self.parts:
            cells = [part.name, MARKS[part.status], f"{part.seconds:.0f}", _cell(part.summary)]
            lines.append(f"| {' | '.join(cells)} |")
        for part in self.parts:
            if part.details:
                lines += ["", f"## {part.name}", "", *part.details]
        lines += ["", "## Safe options", ""]
        if self.passed:
            lines += [f"- {option}" for option in self.safe] or [
                "None: the parts that show it did not run."
            ]
        else:
            lines.append("None, because a part failed. Please report this page as an issue.")
        for part in self.parts:
            if part.log:
                # Longer than any fence in a log.
                lines += ["", f"## Log of “{part.name}”, its end", "", "``````text", *part.log]
                lines.append("``````")
        return "\n".join(lines) + "\n"


def safe_options(parts: list[Part], reports: list[PartReport], device: str) -> list[str]:
    """Return what the passed parts allow on a device, ``"cpu"`` or ``"cuda"``.

    On a GPU more must have passed.
    """
    passed = {report.name for report in reports if report.status == "passed"}
    allowed = [part.allows for part in parts if part.allows and part.name in passed]
    return [] if device == "cuda" and not passed.issuperset(BEFORE_OTHERS) else allowed


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _MAX_CELL else line[: _MAX_CELL - 1] + "…"
