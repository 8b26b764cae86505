"""Tasks whose answers are known in part: edits of generated files, and JSON schemas."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

KINDS = ("rename", "docstring", "parameter", "constant", "comments")
FORMS = ("flat", "nested", "enums", "array", "call")
TOPICS = (
    ("inventory", "item", "quantity"), ("library", "book", "loans"), ("garage", "car", "miles"),
    ("school", "student", "grade"), ("weather", "station", "rain"), ("payroll", "clerk", "hours"),
)  # fmt: skip


class Edit(NamedTuple):
    """An edit of a file."""

    kind: str
    request: str
    """What a client asks for, without the file."""
    source: str
    """The file before the edit."""
    topic: str


def source_file(topic: tuple[str, str, str], seed: int) -> str:
    """Return a Python module about a topic."""
    draw = random.Random(seed)
    name, thing, amount = topic
    limit, rate = draw.randint(10, 90), draw.randint(2, 9)
    return f"""# Keeps the {name}.
LIMIT = {limit}


class {name.title()}:
    def __init__(self):
        self.{amount} = {{}}
        self.total = 0

    # Add a {thing}.
    def add(self, {thing}, number):
        if number > LIMIT:
            raise ValueError("too much")
        self.{amount}[{thing}] = self.{amount}.get({thing}, 0) + number
        self.total = self.total + number

    # Remove a {thing}.
    def remove(self, {thing}):
        number = self.{amount}.pop({thing}, 0)
        self.total = self.total - number
        return number

    # The {thing} with the most {amount}.
    def largest(self):
        return max(self.{amount}, key=self.{amount}.get)

    def report(self):
        for {thing}, number in sorted(self.{amount}.items()):
            print({thing}, number * {rate})
        print("total", self.total)
"""


def edits(per_kind: int) -> list[Edit]:
    """Return edits of each kind, each of a file of its own."""
    asked = {
        "rename": "Rename `total` to `amount`",
        "docstring": "Insert a docstring into each method of",
        "parameter": "Add a parameter `unit` to each method of",
        "constant": "Change LIMIT to 128 in",
        "comments": "Translate the comments into French in",
    }
    return [
        Edit(kind, asked[kind], source_file(topic, seed), topic[0])
        for seed, kind in enumerate(KINDS)
        for topic in TOPICS[:per_kind]
    ]


def undone(text: str, kind: str) -> str:
    """Return what a text may have been before an edit of a kind: the edit turned round."""
    lines = text.splitlines(keepends=True)
    if kind == "rename":
        names = re.findall(r"[a-z_]{4,}", text)
        return re.sub(rf"\b{max(names, key=names.count)}\b", "old_name", text) if names else text
    if kind == "docstring":
        return "".join(line for number, line in enumerate(lines) if number % 9 != 4)
    if kind == "parameter":
        return re.sub(r"\((\w+), ", r"(", text)
    if kind == "constant":
        return re.sub(r"\d+", "77", text)
    return "".join(
        f"# une ligne {number}\n" if number % 8 == 3 else line for number, line in enumerate(lines)
    )


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def schemas() -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, question and JSON schema of 20 tasks, four of each form."""
    number: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}
    flag: dict[str, Any] = {"type": "boolean"}
    word: dict[str, Any] = {"type": "string", "maxLength": 24}
    tasks = []
    for thing in ("customer", "vehicle", "recipe", "city"):
        about = f"Describe a {thing} as JSON."
        tasks += [
            (
                "flat", about,
                _object(display_name=word, identifier=number, is_active=flag, year_created=number),
            ),
            (
                "nested", about,
                _object(
                    general_information=_object(display_name=word, identifier=number),
                    location_details=_object(
                        latitude_degrees=number, longitude_degrees=number, country_code=word
                    ),
                ),
            ),
            (
                "enums", f"Classify a {thing} as JSON.",
                _object(
                    classification_status=_enum("approved_by_reviewer", "rejected_by_reviewer"),
                    confidence_level=_enum("very_high_confidence", "moderate_confidence"),
                    recommended_action=_enum("continue_processing", "stop_processing"),
                ),
            ),
            (
                "array", f"List three of a {thing}'s parts as JSON.",
                _object(
                    component_list={
                        "type": "array", "minItems": 3, "maxItems": 3,
                        "items": _object(component_name=word, component_count=number),
                    }
                ),
            ),
            (
                "call", f"Call the function that looks a {thing} up.",
                _object(
                    function_name=_enum(f"find_{thing}_in_database"),
                    function_arguments=_object(
                        search_expression=word, maximum_number_of_results=number,
                        include_archived_entries=flag,
                    ),
                ),
            ),
        ]  # fmt: skip
    return tasks
