"""What passes between the scheduler and the worker about the rows of groups.

The worker's sampler knows the best tokens of each row. A search without rules of its own needs the
best continuations of all rows together, which are hundreds of times fewer: its rows ask the sampler
for nothing, and the worker selects them with the rows' cumulative log-probabilities. Nor does the
sampler give log-probabilities after a bias or a mask: with those, the worker selects, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_trie.beam.top_k import TokenRules
from vllm_trie.items.step import RowCandidates

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


class RowOutput(NamedTuple):
    """Output of a row, kept until all rows of its group have one.

    Attributes:
        token_id: Token that the worker sampled and appended to its copy of the row.
        logprobs: Log-probabilities of the step's batch.
        place: Index of the row in `logprobs`.
    """

    token_id: int
    logprobs: LogprobsLists
    place: int


def candidates_of(outputs: Sequence[RowOutput], count: int | None = None) -> RowCandidates:
    """Return the candidates of rows whose outputs may be of different steps, best first.

    Their targets are tokens, in a catalogue those of :mod:`vllm_trie.items.step`.

    Args:
        outputs: Of the rows.
        count: Candidates of each row; as many as there are if None.
    """
    by_step: dict[int, list[int]] = {}
    for i, output in enumerate(outputs):
        by_step.setdefault(id(output.logprobs), []).append(i)
    width = count or max(output.logprobs.logprobs.shape[1] for output in outputs) - 1
    token_ids = np.zeros((len(outputs), width), dtype=np.int32)
    logprobs = np.full(token_ids.shape, -np.inf, dtype=np.float32)
    for rows in by_step.values():
        batch = outputs[rows[0]].logprobs
        places = [outputs[i].place for i in rows]
        # Column 0 is the sampled token; the candidates follow.
        given = batch.logprobs[places, 1 : 1 + width]
        logprobs[rows, : given.shape[1]] = given
        token_ids[rows, : given.shape[1]] = batch.logprob_token_ids[places, 1 : 1 + width]
    return RowCandidates(token_ids, logprobs)
