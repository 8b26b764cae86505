"""What passes between the scheduler and the worker about the rows of groups.

A search without rules of its own needs the best continuations of all rows together, which are
hundreds of times fewer than the best of each row. Rows therefore ask the sampler for nothing, which
would give the same number of log-probabilities to all requests of the batch. The worker selects
candidates next to the sampler, with the rows' cumulative log-probabilities or from a catalogue, and
sends them with the step's output. Where it cannot, rows take the sampler's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_trie.beam import Candidates
from vllm_trie.beam.top_k import TokenRules
from vllm_trie.items.step import Continuations

StepCandidates = Candidates | Continuations
"""Candidates of a group: tokens, or nodes of its catalogue."""

CANDIDATES = "vllm_trie_candidates"
"""Attribute of a ``ModelRunnerOutput``: the :data:`StepCandidates` of each of :data:`ROW_STEPS`, by
row of the step; None for a group whose candidates failed."""

ROW_STEPS = "vllm_trie_rows"
"""Attribute of a ``SchedulerOutput``: a list of :class:`SelectionStep` and
:class:`~vllm_trie.vllm_hooks.scheduler.items.catalogues.ItemStep`. Missing if there is none in an
engine without catalogues."""


REUSED_ROWS = "vllm_trie_reused_rows"
"""Attribute of a ``SchedulerOutput``: a list of :class:`ReusedRows`. Missing if there are none."""


class ReusedRows(NamedTuple):
    """Rows of one group that go on as children of other rows. They keep ids and blocks.

    Attributes:
        row_ids: The rows.
        prompt_len: Tokens of the prompt, which all rows share.
        token_ids: int32[rows, generated tokens], in the place of theirs.
    """

    row_ids: list[str]
    prompt_len: int
    token_ids: np.ndarray


class SelectionStep(NamedTuple):
    """Rows of one group in a step, without a catalogue.

    Attributes:
        row_ids: The rows.
        prompt_len: Tokens that they share.
        totals: float32[rows], their cumulative log-probabilities. None to select among the
            continuations of each row, not of all rows together.
        num_candidates: Continuations to select.
        rules: They come before the selection; None if there are none.
    """

    row_ids: list[str]
    prompt_len: int
    totals: np.ndarray | None
    num_candidates: int
    rules: TokenRules | None = None


def at_rows(places: np.ndarray, candidates: StepCandidates) -> StepCandidates:
    """Return candidates with their rows' places in the group.

    Args:
        places: int [rows], ascending; -1 for a row whose candidates are left out.
        candidates: By row of the step.
    """
    rows = places[candidates.rows]
    kept = rows >= 0
    if kept.all():
        return candidates._replace(rows=rows)
    return type(candidates)(rows[kept], *(values[kept] for values in candidates[1:]))


def merged(parts: Sequence[StepCandidates]) -> StepCandidates:
    """Return the candidates of a group's rows whose outputs are of different steps, by row."""
    if len(parts) == 1:
        return parts[0]
    rows, *values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(rows, kind="stable")
    return type(parts[0])(rows[order], *(each[order] for each in values))


def of_sampler(logprobs: LogprobsLists, places: list[int], count: int) -> Candidates:
    """Return the best tokens of requests, as vLLM's sampler gives them.

    Args:
        logprobs: Of the step's batch.
        places: Indices of the requests in it.
        count: Tokens of each request.
    """
    # Column 0 is the sampled token; the candidates follow.
    columns = slice(1, 1 + count)
    return Candidates.of_rows(
        logprobs.logprob_token_ids[places, columns], logprobs.logprobs[places, columns]
    )
