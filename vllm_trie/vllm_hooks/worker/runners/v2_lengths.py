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
from typing import TYPE_CHECKING

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


def draft_lengths(
    output: SchedulerOutput, drafted: Mapping[str, int], graph_lengths: Collection[int]
) -> dict[str, int]:
    """Return how many tokens each scheduled draft verifies.

    Args:
        output: As scheduled.
        drafted: Tokens drafted, by request id.
        graph_lengths: Lengths of drafts that CUDA graphs were captured for, where these take one
            length for all requests of a batch; empty where they take any.
    """
    places = output.scheduled_spec_decode_tokens
    lengths = {name: min(drafted[name], len(tokens)) for name, tokens in places.items()}
    decodes_only = all(
        name in places and number == 1 + len(places[name])
        for name, number in output.num_scheduled_tokens.items()
    )
    room = min(map(len, places.values()))
    fitting = [n for n in graph_lengths if max(lengths.values()) <= n <= room]
    if decodes_only and fitting:
        return dict.fromkeys(lengths, min(fitting))
    return lengths


def shortened(output: SchedulerOutput, lengths: Mapping[str, int]) -> SchedulerOutput:
    """Return the step with drafts of these lengths; the scheduler's own object stays as it is."""
    places = output.scheduled_spec_decode_tokens
    num_tokens = dict(output.num_scheduled_tokens)
    for name, length in lengths.items():
        num_tokens[name] -= len(places[name]) - length
    step = copy.copy(output)
    step.num_scheduled_tokens = num_tokens
    # The total counts beams, too, which are not among the requests.
    removed = sum(output.num_scheduled_tokens.values()) - sum(num_tokens.values())
    step.total_num_scheduled_tokens = output.total_num_scheduled_tokens - removed
    step.scheduled_spec_decode_tokens = {
        name: places[name][:length] for name, length in lengths.items() if length
    }
    return step


def shortened_masks(
    grammar: GrammarOutput, places: Mapping[str, int], lengths: Mapping[str, int]
) -> GrammarOutput:
    """Return the grammar's masks without those of places that are not verified.

    Args:
        grammar: As scheduled, in vLLM 0.32 with one row for each request's last token and each of
            its places.
        places, lengths: Scheduled and verified draft tokens, by request id.
    """
    if not HAS_ROW_PER_PLACE:
        return grammar
    kept, first = [], 0
    for name in grammar.structured_output_request_ids:
        kept.append(first + np.arange(1 + lengths.get(name, 0)))
        first += 1 + places.get(name, 0)
    rows = np.concatenate(kept) if kept else np.arange(0)
    return replace(grammar, grammar_bitmask=grammar.grammar_bitmask[rows])
