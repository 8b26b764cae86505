"""The arguments and results of drafting from n-grams."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vllm_trie.drafts.drafter import LogitsRows
from vllm_trie.tree import TokenTree


class Job(NamedTuple):
    """One request of a batch that is drafted for."""

    own: Any | None
    """Index with the request's own text, which is given `tokens[:num_indexed]`; None to draft from
    the heads' candidates alone."""
    store: Any | None
    """Index of finished requests; requires `own`."""
    archive: Any | None
    """A read-only index; requires `own`."""
    tokens: np.ndarray
    """int32 [num_tokens], contiguous: the end of the request's text, which the draft continues."""
    num_indexed: int
    max_nodes: int
    max_depth: int
    chain_only: bool
    min_probability: float = 0.0
    """Nodes whose path is less likely are left out."""
    recycled: Any | None = None
    """Table of what the model held likely."""
    rows: LogitsRows | None = None
    """Rows of logits that the table takes in first. The text's last token follows the last accepted
    node."""
    scope: int = 0
    """Part of the table: requests of different scopes share nothing."""
    first: int = 0
    """Place of `tokens[0]` in the request's text."""
    text: int = 0
    """Number of the request's text in `own`."""
    answer: int = -1
    """Text of the store that answered such a prompt, -1 for none."""
    output_begin: int = 0
    """Place in `tokens` where the output begins, negative if it is before them."""
    prompt: int = 0
    """Number of the prompt in the table: requests with the same one ask what was likely in its
    answers first. An int32, 0 without."""
    is_sampled: bool = False
    """Whether the request has a temperature."""
    step_row: int = -1
    """Row of the tokens that a step is about to give, with which the text goes on. All but the last
    of them will be the first nodes of `rows`, a chain, and the rows of logits are there when they
    are. `max_depth` counts from the text before them. -1 if the text is complete."""


class Candidates(NamedTuple):
    """Predictions of a model's heads, which need no text.

    All are contiguous, [jobs, K, m]: for each job and head m different tokens, the likeliest first
    unless there are transitions. Head i predicts the token at depth i + 1.
    """

    tokens: np.ndarray
    """int32."""
    probabilities: np.ndarray
    """float32. A candidate without probability (or NaN) is none."""
    transitions: np.ndarray | None = None
    """float32 [jobs, K - 1, m, m]: the probabilities of head i + 1 after each candidate of head i.
    After other tokens they are its `probabilities`."""


class Draft(NamedTuple):
    """A draft for one request."""

    tree: TokenTree
    used_text: int
    """The text of the store that matched, -1 if none did."""
