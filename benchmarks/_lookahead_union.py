"""Rows of the lookahead benchmark that compare the union of drafters with its parts."""

from __future__ import annotations

from typing import Any

from _common import Row, in_turns
from _lookahead_stage import PARTS, Stage, decode, row_of

from vllm_trie.demo import engines

_PRODUCT = {"joint": "product"}


def union_rows(plain: Any, stage: Stage, name: str, prompts: Any, options: Any) -> list[Row]:
    """The unions and their parts on one prompt set."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    forget = {"ngram_trie": {"store_tokens": 0}}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "ngram_trie": ("ngram_trie", engines.without_memory("ngram_trie")),
        "lookahead_trie": ("lookahead_trie", {}),
        "medusa_dynamic": ("medusa_dynamic", {}),
        "medusa_product": ("medusa_dynamic", _PRODUCT),
        "union_two": ("trie_union", {"drafters": PARTS[:2], "options": forget}),
        "union": ("trie_union", {"drafters": PARTS, "options": forget}),
        "union_product": (
            "trie_union",
            {"drafters": PARTS, "options": {**forget, "medusa_dynamic": _PRODUCT}},
        ),
    }
    nodes, size = options.nodes, options.union_batch_size
    expected = decode(plain, prompts, params, size)
    runs = {}
    for method, (kind, settings) in methods.items():
        new = stage.make(kind, settings, nodes)
        runs[method] = lambda new=new: stage.run(new, nodes, prompts, params, size)
    timed = in_turns(runs, options.repeats)
    rows = {method: row_of(method, repeats, expected) for method, repeats in timed.items()}
    parts = {
        "union_two": ("ngram_trie", "lookahead_trie"),
        "union": ("ngram_trie", "lookahead_trie", "medusa_dynamic"),
        "union_product": ("ngram_trie", "lookahead_trie", "medusa_product"),
    }
    for method, row in rows.items():
        row["prompt_set"], row["nodes"] = name, nodes
        if method in parts:
            best = max(rows[part]["tokens_per_step"] for part in parts[method])
            row["over_best_part"] = row["tokens_per_step"] / best - 1
    return list(rows.values())
