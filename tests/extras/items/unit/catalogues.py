"""Random catalogues, as tries and as plain Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.selection import Rules
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie import ItemTrie
from vllm_trie.extras.items.trie_file import open_items

Items = dict[tuple[int, ...], int]
"""Tokens of each item, and its id."""


def random_items(
    seed: int, count: int, vocab: int, lengths: tuple[int, int] = (3, 8), branching: int = 0
) -> Items:
    """Random items; with `branching`, each level has that many tokens of its own."""
    rng = np.random.default_rng(seed)
    low, high = lengths
    items: Items = {}
    while len(items) < count:
        length = int(rng.integers(low, high + 1))
        if branching:
            tokens = 1 + branching * np.arange(length) + rng.integers(branching, size=length)
        else:
            tokens = rng.integers(1, vocab, size=length)
        items.setdefault(tuple(tokens.tolist()), 1000 + len(items))
    return items


def weight_of(number: int) -> float:
    """The weight of an item with this id, in catalogues with weights."""
    return number * 7 % 5 / 4 - 0.5


def write(path: Path, items: Items, text_ids: bool = False, weights: bool = False) -> Path:
    """Build the trie of a catalogue."""
    lines = [
        json.dumps(
            {"id": f"item {i}" if text_ids else i, "tokens": list(tokens)}
            | ({"weight": weight_of(i)} if weights and weight_of(i) else {})
        )
        for tokens, i in items.items()
    ]
    source = path.with_suffix(".jsonl")
    source.write_text("\n".join(lines) + "\n")
    build_items(path, read_items(source))
    return path


def trie_of(path: Path, items: Items, text_ids: bool = False, weights: bool = False) -> ItemTrie:
    return open_items(write(path, items, text_ids, weights))


class PlainTrie:
    """A catalogue in dictionaries: the tokens that may follow, and the items."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.next_tokens: dict[tuple[int, ...], set[int]] = {}
        for tokens in items:
            for depth, token in enumerate(tokens):
                self.next_tokens.setdefault(tokens[:depth], set()).add(token)

    def allowed(self, path: tuple[int, ...], eos: int | None) -> list[int]:
        tokens = sorted(self.next_tokens.get(path, ()))
        return [*tokens, eos] if eos is not None and path in self.items else tokens

    def outcome(self, token_ids: list[int]) -> tuple[bool, bool]:
        path = tuple(token_ids)
        return path in self.items, path in self.next_tokens


def selected_items(items: Items, ids_of: Mapping[tuple[int, ...], Any], rules: Rules) -> Items:
    """Return the items that the rules leave."""

    def begins(tokens, prefixes):
        return any(tokens[: len(prefix)] == tuple(prefix) for prefix in prefixes)

    everything = rules.allow_items is None and rules.allow_prefixes is None
    return {
        tokens: number
        for tokens, number in items.items()
        if (
            everything
            or ids_of[tokens] in (rules.allow_items or ())
            or begins(tokens, rules.allow_prefixes or ())
        )
        and ids_of[tokens] not in rules.deny_items
        and not begins(tokens, rules.deny_prefixes)
    }
