"""Tables of the documentation that are read off the code: options, commands, limits."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent.parent
OPTION_CLASSES = {
    "AllOptions": "vllm_trie.drafts.engine.config",
    "NgramTrieOptions": "vllm_trie.drafts.ngram_trie.options",
    "MedusaOptions": "vllm_trie.extras.heads.options",
    "LookaheadOptions": "vllm_trie.extras.lookahead.options",
    "TrieUnionOptions": "vllm_trie.extras.union.options",
    "NeuralOptions": "vllm_trie.extras.union.options",
    "BeamOptions": "vllm_trie.searches.settings",
    "ItemOptions": "vllm_trie.extras.items.options",
}
"""Classes of options that the documentation has a table of, and their modules."""

_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_in(markdown: str) -> str:
    """The page with the text between its `<!-- generated: NAME -->` marks made anew."""
    return _MARKED.sub(lambda match: match[1] + generate(match[2]) + match[3], markdown)


def generate(name: str) -> str:
    """The generated text called `name`: a class of options, or one of the tables below."""
    made = {"commands": commands, "limits": limits, "modules": modules}
    return made[name]() if name in made else option_table(option_class(name))


def modules() -> str:
    """A list of the package's folders and modules, with the first sentence of their docstrings."""
    lines, folder = list[str](), None
    for path in sorted((ROOT / "vllm_trie").rglob("*.py"), key=lambda path: (path.parent, path)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(re.split(r"(?<=\.)\s|\n\n|::\n", docstring)[0].split())
        sentence = re.sub(r":\w+:`[~.]*(.*?)`", r"`\1`", sentence).replace("``", "`")
        place = path.relative_to(ROOT / "vllm_trie")
        if place.parent != folder:
            folder = place.parent
            lines += ["", f"**`{folder.as_posix()}/`**", ""] if folder.name else [""]
        if sentence and place.name == "__init__.py":
            if folder.name:
                lines[-2] += f" {sentence}"
        elif sentence:
            lines.append(f"- `{place.name}`: {sentence.removesuffix('.')}")
    return "\n".join(lines) + "\n\n"


def limits() -> str:
    """A Markdown table of what stops the features, from the table that start-up reads."""
    from vllm_trie.hooks.start.limits import FEATURES, LIMITS

    effects = {"trees": "no", "chains": "no", "beams": "off"}
    lines = [
        " | ".join(["| condition", *FEATURES.values()]) + " |",
        " | ".join(["| ---", *("---" for _ in FEATURES)]) + " |",
    ]
    stops: dict[str, set[str]] = {}
    for limit in LIMITS:
        stops.setdefault(limit.condition, set()).update(limit.stops)
    for condition, features in stops.items():
        cells = [effects[name] if name in features else "" for name in FEATURES]
        lines.append(" | ".join([f"| {condition}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def option_class(name: str) -> type[BaseModel]:
    """A class of :data:`OPTION_CLASSES`."""
    options: type[BaseModel] = getattr(importlib.import_module(OPTION_CLASSES[name]), name)
    return options


def option_table(options: type[BaseModel]) -> str:
    """A Markdown table of a class of options: name, default, allowed values, effect."""
    lines = ["| option | default | allowed | effect |", "| --- | --- | --- | --- |"]
    for name, field in options.model_fields.items():
        cells = [f"`{name}`", default_text(field), allowed_text(field), field.description or ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in JSON; "none" where an option may be left out."""
    if field.is_required():
        return "required"
    if field.default is None:
        return "none"
    return f"`{json.dumps(field.default)}`"


def allowed_text(field: FieldInfo) -> str:
    """Type and bounds of an option."""
    kinds = " or ".join(dict.fromkeys(_kinds(field.annotation)))
    bounds = {
        key: getattr(rule, key)
        for rule in field.metadata
        for key in ("ge", "gt", "le", "min_length", "max_length")
        if getattr(rule, key, None) is not None
    }
    if "min_length" in bounds or "max_length" in bounds:
        return f"{kinds}, {bounds.get('min_length', 0)} to {bounds['max_length']} of them"
    low = (
        f"{bounds['ge']:g}"
        if "ge" in bounds
        else f"above {bounds['gt']:g}"
        if "gt" in bounds
        else ""
    )
    if low and "le" in bounds:
        return f"{kinds}, {low} to {_number(bounds['le'])}"
    return f"{kinds}, at least {low}" if "ge" in bounds else f"{kinds}, {low}" if low else kinds


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _kinds(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif origin is Literal:
        yield from (f"`{json.dumps(value)}`" for value in get_args(annotation))
    elif origin is list:
        inner = list(_kinds(get_args(annotation)[0]))
        nested = inner[0].startswith("list")
        yield f"list of lists{inner[0][4:]}" if nested else "list of " + "s or ".join(inner) + "s"
    elif origin is dict:
        yield "mapping"
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(get_args(annotation)[0])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "mapping"
    elif annotation is not NoneType:
        names = {int: "integer", float: "number", bool: "boolean", str: "string"}
        yield names[annotation]


def commands() -> str:
    """Return a Markdown table of every command of `vllm-trie`: usage, summary, options."""
    import typer

    from vllm_trie.cli import GROUPS, LAB_COMMANDS, app

    root: Any = typer.main.get_command(app)
    rows = []
    for name in sorted(LAB_COMMANDS):
        rows.append(_command_row(f"vllm-trie {name}", root.get_command(None, name)))
    for group, module in sorted(GROUPS.items()):
        below: Any = typer.main.get_command(importlib.import_module(module).app)
        if not hasattr(below, "commands"):
            rows.append(_command_row(f"vllm-trie {group}", below))
            continue
        for name, command in below.commands.items():
            rows.append(_command_row(f"vllm-trie {group} {name}", command))
    header = ["| command | purpose | options and defaults |", "| --- | --- | --- |"]
    return "\n".join([*header, *rows]) + "\n"


def _command_row(name: str, command: Any) -> str:
    summary = " ".join((command.help or "").split("\n\n")[0].split())
    usage, options = [name], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            usage.append(parameter.metavar or parameter.name.upper())
        elif parameter.name != "help":
            spelled = " / ".join([*parameter.opts, *parameter.secondary_opts])
            options.append(f"`{spelled}`{_command_default(parameter)}")
    return f"| `{' '.join(usage)}` | {summary} | {', '.join(options)} |"


def _command_default(parameter: Any) -> str:
    default = parameter.default
    if callable(default) or default in ("", None, ()) or _is_unset(default):
        return " (required)" if parameter.required else ""
    if isinstance(default, bool):
        return " on" if default else ""
    return f" {getattr(default, 'value', default)}"


def _is_unset(value: Any) -> bool:
    return type(value).__name__ in ("Sentinel", "_MissingType")
