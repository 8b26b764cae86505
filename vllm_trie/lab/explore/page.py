"""One self-contained HTML file of traces.

The text in it is a model's output and a user's prompt, so it is data and never markup: it stands in
the page as JSON without `<`, `>` and `&`, the script puts it into text nodes, and the page's
content security policy allows this script alone and no request to anywhere.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from statistics import median
from string import Template
from typing import Any, NamedTuple

from vllm_trie.extras.traces.trace_file import Step, Trace
from vllm_trie.lab.explore.origins import origins
from vllm_trie.lab.tree_text import visible_text
from vllm_trie.searches.trace import SearchTrace

Decode = Callable[[Sequence[int]], str]
"""From token ids to their text."""

_ENDS = {
    "complete": "",
    "steps": "The trace is truncated: the generation has more steps than a trace holds.",
    "bytes": "The trace is truncated: the generation is larger than a trace may be.",
    "missing": "The trace is truncated: the file has no end. The engine was stopped, a fault ended "
    "the trace, or the request still runs.",
}
_SCRIPTS = ("tools", "lanes", "charts", "trees", "beams", "page")
_LONGEST_LABEL = 40  # characters of one token
_FEWEST_UNDRAFTED = 3  # steps whose median stands for a step of plain vLLM


class Beams(NamedTuple):
    """A beam search to show.

    Attributes:
        search: With dropped candidates.
        num_prompt_tokens: Of the prompt.
        block_size: Tokens of a KV block.
    """

    search: SearchTrace
    num_prompt_tokens: int
    block_size: int


def page(traces: Sequence[Trace], decode: Decode, beams: Beams | None = None) -> str:
    """Return the page of some generations, side by side, and of a beam search.

    Args:
        traces: Of one prompt where they are to be compared. Those of one method are told apart by
            their requests' ids.
        decode: Of the model's tokenizer, special tokens included.
        beams: Shown in a view of its own.
    """
    token_ids: set[int] = set()
    for trace in traces:
        for step in trace.steps:
            token_ids.update(step.tokens, step.nodes)
    if beams is not None:
        token_ids.update(beams.search.token_ids)
    first = traces[0].header if traces else None
    title = first.model.rstrip("/").rpartition("/")[2] if first else "beam search"
    methods = [trace.header.method for trace in traces]
    names = [
        method if methods.count(method) == 1 else f"{method} {trace.header.request_id}".strip()
        for method, trace in zip(methods, traces, strict=True)
    ]
    # Its form is described in `tools.js`.
    document = {
        "title": title,
        "prompt": "" if first is None else decode(first.prompt),
        "promptCut": first is not None and first.num_prompt_tokens > len(first.prompt),
        "runs": [
            _run(trace, name, decode, _speed(trace, traces))
            for trace, name in zip(traces, names, strict=True)
        ],
        "beams": None if beams is None else _beams(beams, decode),
        "labels": {token: visible_text(decode([token]))[:_LONGEST_LABEL] for token in token_ids},
    }
    folder = files("vllm_trie.lab.explore") / "assets"
    script = "\n".join((folder / f"{n}.js").read_text(encoding="utf-8") for n in _SCRIPTS)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # JSON needs none of the three outside of strings, and inside it may write them so.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{title} · vllm-trie explore"),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=script,
        digest=digest,
        data=data,
    )


class Speed(NamedTuple):
    """The speed of a generation over plain decoding, without their prefills."""

    factor: float
    source: str
    """How plain decoding's time is known."""


def _speed(trace: Trace, traces: Sequence[Trace]) -> Speed | None:
    """Return a generation's speed over plain decoding; None where nothing tells."""
    steps = trace.steps[1:]
    if not any(step.nodes for step in steps):
        return None
    plain = next((other for other in traces if other.header.method == "plain"), None)
    if plain is not None and plain.header.prompt == trace.header.prompt and plain.steps[1:]:
        factor = _seconds_per_token(plain.steps[1:]) / _seconds_per_token(steps)
        return Speed(factor, "measured against plain")
    undrafted = [step.seconds for step in steps if not step.nodes]
    if len(undrafted) < _FEWEST_UNDRAFTED:
        return None
    factor = median(undrafted) / _seconds_per_token(steps)
    return Speed(factor, f"estimated by the median of {len(undrafted)} steps without a draft")


def _seconds_per_token(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps) / sum(len(step.tokens) for step in steps) or 1e-9


def _run(trace: Trace, name: str, decode: Decode, speed: Speed | None) -> dict[str, Any]:
    header = trace.header
    texts = pieces([step.tokens for step in trace.steps], decode)
    steps = []
    for step, text, letters in zip(trace.steps, texts, origins(trace), strict=True):
        derived = {"text": text} | ({"origins": letters} if letters else {})
        steps.append(step.model_dump(exclude_defaults=True) | derived)
    values = {
        "request": header.request_id,
        "date": header.created.strftime("%Y-%m-%d %H:%M UTC") if header.created else "",
        **header.options,
    }
    about = " · ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if value != ""
    )
    return {
        "method": name,
        "about": about,
        "notice": _ENDS[trace.end],
        "speed": speed,
        "steps": steps,
    }


def _beams(beams: Beams, decode: Decode) -> dict[str, Any]:
    search = beams.search
    paths = []
    for node in search.returned:
        path = []
        while node >= 0:
            path.append(search.token_ids[node])
            node = search.parents[node]
        paths.append(path[::-1])
    return {
        **search._asdict(),
        "sums": [round(value, 4) for value in search.sums],
        "texts": [decode(path) for path in paths],
        "promptTokens": beams.num_prompt_tokens,
        "blockSize": beams.block_size,
    }


def pieces(parts: Sequence[Sequence[int]], decode: Decode) -> Iterator[str]:
    """Yield the text that each part of a token sequence adds.

    A character whose bytes are spread over parts comes with the last of them. Tokens are decoded
    after their predecessors, because tokenizers treat the beginning of a text in their own way.
    """
    token_ids: list[int] = []
    begin = read = 0
    for number, part in enumerate(parts):
        token_ids += part
        read_text, text = decode(token_ids[begin:read]), decode(token_ids[begin:])
        if text.endswith("\ufffd") and number < len(parts) - 1:
            yield ""
            continue
        yield text[len(read_text) :]
        begin, read = read, len(token_ids)
