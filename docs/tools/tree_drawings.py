"""Drawings of tree speculation. Trees, masks and accepted paths come from the package itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from docs.tools.svg import Canvas, Point
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.tree import ROOT, TokenTree, accept_greedy

TEXT = ["open", "the", "red", "door", ",", "open", "the", "blue", "door", ",", "open", "the"]
"""The text so far, a word a token."""
CONTINUATION = ["red", "door", ",", "close", "it"]
"""What the target model goes on with."""
NUM_NODES = 8

_VOCABULARY = list(dict.fromkeys([*TEXT, *CONTINUATION]))
_ROW = 36


class Step(NamedTuple):
    """One step of speculation on :data:`TEXT`."""

    tree: TokenTree
    words: list[str]
    """The word of each node."""
    target: list[int]
    """The target's token after the last committed token and after each node."""
    accepted: list[int]


def example_step() -> Step:
    """Draft for :data:`TEXT` with the default scoring, and verify against the continuation."""
    tokens = [_VOCABULARY.index(word) for word in TEXT]
    backend = NativeBackend(BLEND)
    text = np.array(tokens, dtype=np.int32)
    own = backend.new_index(max_order=8)
    [draft] = backend.draft_batch([Job(own, None, None, text, len(text), NUM_NODES, 4, False)])
    tree = draft.tree
    continues = [_VOCABULARY.index(word) for word in CONTINUATION]
    depths = [0, *tree.depths().tolist()]
    target = [continues[depth] for depth in depths]
    accepted = accept_greedy(tree.token_ids.tolist(), tree.parents.tolist(), target)
    return Step(tree, [_VOCABULARY[token] for token in tree.token_ids], target, accepted)


def _rows(children: Mapping[int, Sequence[int]], roots: Sequence[int]) -> dict[int, float]:
    """Row of each node: leaves one below the other, parents in the middle of their children."""
    rows: dict[int, float] = {}
    next_row = 0

    def place(node: int) -> float:
        nonlocal next_row
        below = [place(child) for child in children.get(node, ())]
        if below:
            rows[node] = (below[0] + below[-1]) / 2
        else:
            rows[node] = next_row
            next_row += 1
        return rows[node]

    for root in roots:
        place(root)
    return rows


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def trie() -> str:
    """The n-gram trie of the text, and the tree that is drafted from it."""
    canvas = Canvas(820, 420, "An n-gram trie of a text and the draft tree made from it")
    canvas.text(20, 30, "The text so far", "title")
    for number, word in enumerate(TEXT):
        style = "green" if number >= len(TEXT) - 2 else "soft"
        canvas.token(20 + 65 * number, 42, word, style, 60)

    canvas.text(20, 102, "Its trie of 3-grams, with their counts", "title")
    tokens = [_VOCABULARY.index(word) for word in TEXT]
    counts = Counter(
        tuple(tokens[i : i + n]) for n in (1, 2, 3) for i in range(len(tokens) - n + 1)
    )
    nodes: list[tuple[int, int, int, int]] = []  # token, parent, count, depth

    def collect(path: tuple[int, ...], parent: int) -> None:
        for longer, count in counts.items():
            if longer[:-1] == path:
                nodes.append((longer[-1], parent, count, len(path)))
                collect(longer, len(nodes) - 1)

    collect((), ROOT)
    children = _children([parent for _, parent, _, _ in nodes])
    rows = _rows(children, children[ROOT])
    suffix: set[int] = set()
    walk = ROOT
    for word in TEXT[-2:]:
        walk = next(n for n in children[walk] if _VOCABULARY[nodes[n][0]] == word)
        suffix.add(walk)
    for number, (token, parent, count, depth) in enumerate(nodes):
        y = 116 + _ROW * rows[number]
        x = 20 + 125 * depth
        if parent >= 0:
            start = Point(20 + 125 * (depth - 1) + 84, 116 + _ROW * rows[parent] + 13)
            on_path = number in suffix
            canvas.edge(start, Point(x, y + 13), "edge-green" if on_path else "edge")
        style = "green" if number in suffix else "blue" if parent == walk else "soft"
        canvas.token(x, y, f"{_VOCABULARY[token]} {count}", style, 84)

    canvas.text(450, 102, "The tree drafted after “open the”", "title")
    step = example_step()
    probabilities = step.tree.probabilities
    assert probabilities is not None
    _draw_tree(
        canvas, step.tree, 450, 130, 90,
        [f"{word} {p:.0%}" for word, p in zip(step.words, probabilities, strict=True)],
        ["blue"] * step.tree.num_nodes,
    )  # fmt: skip
    canvas.lines(
        450, 330,
        ["The longest suffix that occurred before is “open the”.",
         "Its successors lead; shorter suffixes supply",
         "the rest. Each node has the probability that",
         "the whole path to it is right."],
        "small dim",
    )  # fmt: skip
    return canvas.render()


def _draw_tree(
    canvas: Canvas,
    tree: TokenTree,
    left: float,
    top: float,
    step: float,
    labels: Sequence[str],
    styles: Sequence[str],
    row: float = 44,
) -> None:
    parents = tree.parents.tolist()
    children = _children(parents)
    rows = _rows(children, children[ROOT])
    depths = tree.depths().tolist()
    width = step - 14
    for node, parent in enumerate(parents):
        x = left + step * (depths[node] - 1)
        y = top + row * rows[node]
        if parent >= 0:
            accepted = styles[node] == styles[parent] == "green"
            canvas.edge(
                Point(x - step + width, top + row * rows[parent] + 13),
                Point(x, y + 13),
                "edge-green" if accepted else "edge",
            )
        canvas.token(x, y, labels[node], styles[node], width)


def step() -> str:
    """One verification step, from the draft to the kept KV."""
    example = example_step()
    tree, words, target, accepted = example
    num_nodes = tree.num_nodes
    canvas = Canvas(820, 585, "One verification step of a draft tree")

    canvas.text(20, 30, "1  A drafter fills a tree", "title")
    canvas.text(20, 48, "numbered in the order in which vLLM’s scheduler gets them", "small dim")
    _draw_tree(
        canvas, tree, 160, 66, 120,
        [f"{node}: {word}" for node, word in enumerate(words)],
        ["blue"] * num_nodes,
        38,
    )  # fmt: skip
    root = Point(90, 66 + 38 + 13)
    canvas.token(20, root.y - 13, TEXT[-1], "soft", 70)
    canvas.text(55, root.y + 30, "last token", "small dim", "middle")
    for level in range(tree.parents.tolist().count(ROOT)):
        canvas.edge(root, Point(160, 66 + 38 * level + 13))

    columns = [110 + 77 * i for i in range(num_nodes + 1)]
    _draw_forward_pass(canvas, example, columns)
    y = 415
    path = " → ".join(words[node] for node in accepted)
    canvas.text(20, y - 14, "3  Walk down while a child has the sampled token", "title")
    canvas.text(150, y + 10, f"accepted: {path}", "green")
    bonus = _VOCABULARY[target[accepted[-1] + 1]]
    canvas.text(450, y + 10, f"then the bonus token: {bonus}", "amber")
    _draw_kept_kv(canvas, example, columns)
    return canvas.render()


def _draw_forward_pass(canvas: Canvas, example: Step, columns: list[int]) -> None:
    tree, words, target, accepted = example
    committed = len(TEXT)
    y = 245
    canvas.text(20, y - 14, "2  One forward pass computes all nodes", "title")
    depths = [0, *tree.depths().tolist()]
    for i, x in enumerate(columns):
        on_path = i == 0 or i - 1 in accepted
        label = TEXT[-1] if i == 0 else words[i - 1]
        canvas.token(x, y, label, "green" if on_path else "blue" if i else "soft", 66)
        canvas.text(x + 33, y + 46, str(committed - 1 + i), "token", "middle")
        canvas.text(x + 33, y + 66, str(committed - 1 + depths[i]), "token", "middle")
        canvas.text(
            x + 33, y + 92, _VOCABULARY[target[i]], "token green" if on_path else "token dim",
            "middle",
        )  # fmt: skip
    canvas.text(20, y + 46, "KV slot", "dim")
    canvas.text(20, y + 66, "position", "dim")
    canvas.text(20, y + 92, "sampled:", "dim")
    canvas.text(
        20, y + 114,
        "Slots are flat; the position follows the depth, so siblings have the same one. "
        "A node sees the text and its own ancestors.",
        "small dim",
    )  # fmt: skip


def _draw_kept_kv(canvas: Canvas, example: Step, columns: list[int]) -> None:
    _, words, target, accepted = example
    committed = len(TEXT)
    bonus = _VOCABULARY[target[accepted[-1] + 1]]
    y = 485
    canvas.text(20, y - 18, "4  KV of accepted nodes moves right behind the text", "title")
    kept = [TEXT[-1], *(words[node] for node in accepted)]
    for i, x in enumerate(columns):
        if i < len(kept):
            canvas.token(x, y, kept[i], "green", 66)
        elif i == len(kept):
            canvas.token(x, y, bonus, "amber dashed", 66)
        else:
            canvas.token(x, y, "", "none dashed", 66)
        canvas.text(x + 33, y + 46, str(committed - 1 + i), "token", "middle")
    canvas.text(20, y + 46, "KV slot", "dim")
    canvas.text(
        20, y + 76,
        f"{len(accepted) + 1} tokens from one step. The bonus token’s KV is computed by the next "
        "step; the other slots are free again.",
        "small dim",
    )  # fmt: skip


def mask() -> str:
    """Which keys each query sees."""
    example = example_step()
    tree, words = example.tree, example.words
    size = tree.num_nodes
    canvas = Canvas(820, 450, "The ancestor mask of a draft tree")
    canvas.text(20, 30, "Visible tokens of each node", "title")
    canvas.text(20, 48, "rows: queries, columns: keys", "small dim")
    left, top, cell = 120, 110, 32
    prefix = ["0", "1", "…", str(len(TEXT) - 2)]
    labels = [*prefix, TEXT[-1], *words]
    for column, label in enumerate(labels):
        x = left + cell * column + cell / 2
        canvas.text(x, top - 8 - 14 * (column % 2), label, "small token", "middle")
    visible = tree.ancestor_mask()
    for number in range(size + 1):
        y = top + cell * number
        label = TEXT[-1] if number == 0 else f"{number - 1}: {words[number - 1]}"
        canvas.text(left - 10, y + 21, label, "token", "end")
        for column in range(len(labels)):
            node = column - len(prefix) - 1
            if node < 0:
                style = "soft"
                seen = True
            else:
                seen = number > 0 and bool(visible[number - 1, node])
                style = "green" if node == number - 1 else "blue"
            canvas.box(
                left + cell * column + 2,
                y + 2,
                cell - 4,
                cell - 4,
                style if seen else "none dashed",
            )
    x = left + cell * len(labels) + 30
    canvas.box(x, top + 2, 20, 20, "soft")
    canvas.lines(
        x + 30, top + 17, ["committed text:", "visible to all,", "no mask is read"], "small"
    )
    canvas.box(x, top + 72, 20, 20, "blue")
    canvas.lines(x + 30, top + 87, ["an ancestor"], "small")
    canvas.box(x, top + 108, 20, 20, "green")
    canvas.lines(x + 30, top + 123, ["the node itself"], "small")
    canvas.box(x, top + 144, 20, 20, "none dashed")
    canvas.lines(x + 30, top + 159, ["not seen: another", "branch, or later"], "small")
    canvas.text(20, 418, "The same as one word per node; the lowest bit is node 0:", "small dim")
    bits = [f"{int(word):0{size}b}" for word in tree.ancestor_words()[:, 0]]
    canvas.text(20, 436, "  ".join(bits), "small token")
    return canvas.render()
