"""Drafts of their own length for each request, on Model Runner V2.

vLLM schedules N placeholders for every request, before drafts are known. The host knows them when
it launches the step, so that the worker verifies what was drafted and no more: a request without a
draft costs one token. The scheduler counts from the output tokens what a request has computed, and
needs not know.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.v1.worker.gpu import structured_outputs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

HAS_ROW_PER_PLACE = hasattr(structured_outputs, "_build_grammar_mapping")
"""Whether a grammar's masks have a row for each scheduled place. Since vLLM 0.33 each request has
N + 1 rows, of which the runner skips those without a row of logits."""


def captured_lengths(manager: CudaGraphManager | None) -> frozenset[int]:
    """Return the lengths of drafts whose steps replay a CUDA graph of one length."""
    lengths = (desc.uniform_token_count for desc in (() if manager is None else manager.graphs))
    return frozenset(length - 1 for length in lengths if length is not None)


def most_logits_rows(tiers: Sequence[tuple[int, int, int]], max_num_seqs: int) -> int:
    """Return the most rows of logits of a step whose batch grows after its drafts were scheduled.

    Args:
        tiers: First and last batch size, and draft tokens of each request.
        max_num_seqs: Of the engine.
    """
    return max_num_seqs + max(min(last, max_num_seqs) * length for _, last, length in tiers)


class CutStep(NamedTuple):
    """A step with as many places for each draft as it verifies.

    Attributes:
        output: The step; the scheduler's own object stays as it is.
        scheduled, places: Places for draft tokens by request id, before and after.
    """

    output: SchedulerOutput
    scheduled: Mapping[str, int]
    places: Mapping[str, int]

    def masks(self, grammar: GrammarOutput | None) -> GrammarOutput | None:
        """Return a grammar's masks without those of places that are not verified.

        Args:
            grammar: As scheduled, in vLLM 0.32 with one row for each request's last token and each
                of its places.
        """
        if grammar is None or self.places is self.scheduled or not HAS_ROW_PER_PLACE:
            return grammar
        kept, first = [], 0
        for name in grammar.structured_output_request_ids:
            kept.append(first + np.arange(1 + self.places.get(name, 0)))
            first += 1 + self.scheduled.get(name, 0)
        rows = np.concatenate(kept) if kept else np.arange(0)
        return replace(grammar, grammar_bitmask=grammar.grammar_bitmask[rows])


def has_prompt_like_decode(output: SchedulerOutput, num_draft_tokens: int) -> bool:
    """Return whether a part of a prompt has as many tokens as a decode with a full draft.

    vLLM sorts it before decodes without a draft, and takes the recurrent states of what comes
    behind a prompt for states of prompts: no draft of such a step may be cut.
    """
    return any(
        number == 1 + num_draft_tokens and name not in output.scheduled_spec_decode_tokens
        for name, number in output.num_scheduled_tokens.items()
    )


def cut(
    output: SchedulerOutput, drafted: Mapping[str, int], graph_lengths: Collection[int] | None
) -> CutStep:
    """Return a step with as many places for each draft as it verifies.

    Args:
        output: As scheduled.
        drafted: Tokens drafted, by request id.
        graph_lengths: Lengths of drafts that CUDA graphs were captured for, where these take one
            length for all requests of a batch; empty where they take any; None verifies all places.
    """
    scheduled = {name: len(places) for name, places in output.scheduled_spec_decode_tokens.items()}
    if not scheduled or graph_lengths is None:
        return CutStep(output, scheduled, scheduled)
    lengths = {name: min(drafted[name], places) for name, places in scheduled.items()}
    decodes_only = all(
        number == 1 + scheduled.get(name, -1)
        for name, number in output.num_scheduled_tokens.items()
    )
    room = min(scheduled.values())
    fitting = [n for n in graph_lengths if max(lengths.values()) <= n <= room]
    if decodes_only and fitting:
        lengths = dict.fromkeys(lengths, min(fitting))
    num_tokens = dict(output.num_scheduled_tokens)
    for name, length in lengths.items():
        num_tokens[name] -= scheduled[name] - length
    step = copy.copy(output)
    step.num_scheduled_tokens = num_tokens
    # The total counts beams, too, which are not among the requests.
    removed = sum(scheduled.values()) - sum(lengths.values())
    step.total_num_scheduled_tokens = output.total_num_scheduled_tokens - removed
    step.scheduled_spec_decode_tokens = {
        name: output.scheduled_spec_decode_tokens[name][:length]
        for name, length in lengths.items()
        if length
    }
    return CutStep(step, scheduled, lengths)
