"""Lossless verification: walk down each tree with the target model's own samples.

At every node the target's token is drawn by vLLM's own sampler from the target's distribution
there; if a child carries that token the walk goes down, otherwise the token ends the step. Each
output token is thus a sample of the target given its prefix, at any temperature. For a
deterministic drafter the chance of going down is what multi-branch rejection sampling would accept
(SpecInfer, Miao et al. 2024, section 4.3, with draft probabilities of one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)

from vllm_trie.tree import accept_greedy
from vllm_trie.vllm_hooks.worker.verification.pending_tree import PendingTree

_ARGMAX_ROWS = 512
"""Rows of logits that are widened at a time on a GPU."""


class TreeSample(NamedTuple):
    """What a step brought, row by row of the batch."""

    token_ids: list[list[int]]
    """Output tokens: those of the accepted nodes and one more."""
    accepted: list[list[int]]
    """Accepted node indices, root first."""
    logprobs: LogprobsTensors | None
    """For ``[num_rows * width]`` tokens, width = the longest row, padded with any values."""

    def padded(self, device: torch.device) -> SamplerOutput:
        """vLLM's form of the sample: rows padded with -1, at least two columns.

        vLLM reads a single column as the output of a step without speculation.
        """
        width = max(2, max(map(len, self.token_ids)))
        rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in self.token_ids]
        token_ids = torch.from_numpy(np.array(rows, dtype=np.int32)).to(device)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=self.logprobs)


class _MinTokensBelow:
    """``min_tokens`` for the tokens ``level`` places behind the committed output."""

    def __init__(self, base: MinTokensLogitsProcessor, level: int) -> None:
        self._base = base
        self._level = level

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (min_tokens, output, stop_ids, structured) in self._base.min_toks.items():
            if len(output) + self._level >= min_tokens or not stop_ids:
                continue
            stops = torch.tensor(sorted(stop_ids), device=logits.device)
            kept = logits[row, stops]
            logits[row, stops] = -torch.inf
            # A grammar may leave nothing but a stop token: vLLM then lets it pass.
            if structured and torch.isneginf(logits[row]).all():
                logits[row, stops] = kept
        return logits


def is_plain_greedy(metadata: Any) -> bool:
    """Whether the argmax of the raw logits is the whole of sampling for every row."""
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and not _tracks_thinking(metadata)
        and all(_is_idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def argmax_of_rows(sampler: Any, logits: torch.Tensor) -> list[int]:
    """The token that greedy sampling takes from each row of logits.

    On CPUs NumPy finds it several times faster than vLLM's operation does, with the same answer
    for ties (the first), infinities and NaN.
    """
    if logits.device.type == "cpu":
        return logits.to(torch.float32).numpy().argmax(axis=-1).tolist()
    # A step of many trees has thousands of rows, whose copy in float32 would take gigabytes.
    parts = [sampler.greedy_sample(part.to(torch.float32)) for part in logits.split(_ARGMAX_ROWS)]
    return torch.cat(parts).tolist()


def sample_greedy(
    token_rows: Sequence[int], base: Sequence[int], trees: Sequence[PendingTree]
) -> TreeSample:
    """Walk all trees by the argmax of each row of logits.

    Args:
        token_rows: argmax of every row of logits; request r owns the rows from ``base[r]``: one
            for its last committed token and one for each node.
        base: first row of each request.
        trees: tree of each request.
    """
    token_ids, accepted = [], []
    for start, tree in zip(base, trees, strict=True):
        if not tree.token_ids:
            token_ids.append([token_rows[start]])
            accepted.append([])
            continue
        target = token_rows[start : start + len(tree.token_ids) + 1]
        path = accept_greedy(tree.token_ids, tree.parents, target, tree.tree.never_accept)
        last = path[-1] + 1 if path else 0
        token_ids.append([*(tree.token_ids[node] for node in path), target[last]])
        accepted.append(path)
    return TreeSample(token_ids, accepted, None)


def sample_levels(
    sampler: Any,
    logits: torch.Tensor,
    base: Sequence[int],
    trees: Sequence[PendingTree],
    metadata: Any,
) -> TreeSample:
    """Walk all trees together, one call of vLLM's sampler per level.

    A row takes part with its own seed's generator only while its walk goes on, and its accepted
    tokens count as output for penalties, bad words and ``min_tokens``: every random number is drawn
    and every processor applied exactly as plain decoding would.

    Args:
        sampler: vLLM's ``Sampler``.
        logits: [num_rows, vocab_size] of the target.
        base, trees: as for :func:`sample_greedy`.
        metadata: vLLM's ``SamplingMetadata`` of the batch.
    """
    num_requests = len(trees)
    children = [_children(tree) for tree in trees]
    node = [-1] * num_requests
    token_ids: list[list[int]] = [[] for _ in trees]
    accepted: list[list[int]] = [[] for _ in trees]
    logprobs: list[LogprobsTensors] = []
    walking = set(range(num_requests))
    while walking:
        level = len(logprobs)
        rows = torch.tensor(
            [start + at + 1 for start, at in zip(base, node, strict=True)], device=logits.device
        )
        output = sampler(
            logits=logits[rows],
            sampling_metadata=_metadata_at(metadata, level, walking, token_ids),
        )
        logprobs.append(output.logprobs_tensors)
        sampled = output.sampled_token_ids.view(-1).tolist()
        for row in sorted(walking):
            token_ids[row].append(sampled[row])
            child = children[row].get((node[row], sampled[row]))
            if child is None:
                walking.discard(row)
            else:
                accepted[row].append(child)
                node[row] = child
    return TreeSample(token_ids, accepted, _interleave(logprobs, num_requests))


def _children(tree: PendingTree) -> dict[tuple[int, int], int]:
    never = tree.tree.never_accept
    return {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        if never is None or not never[node]
    }


def _metadata_at(
    metadata: Any, level: int, walking: set[int], token_ids: Sequence[list[int]]
) -> Any:
    """The batch's sampling metadata for the tokens ``level`` places behind the output."""
    if level == 0:
        return metadata
    output = metadata.output_token_ids
    if output:
        output = [[*done, *new] for done, new in zip(output, token_ids, strict=True)]
    processors = [
        _MinTokensBelow(processor, level)
        if isinstance(processor, MinTokensLogitsProcessor)
        else processor
        for processor in metadata.logitsprocs.all
    ]
    return replace(
        metadata,
        generators={row: g for row, g in metadata.generators.items() if row in walking},
        output_token_ids=output,
        logitsprocs=LogitsProcessors(processors),
    )


def _interleave(levels: list[LogprobsTensors], num_requests: int) -> LogprobsTensors | None:
    """From one entry per level to rows of ``max(2, levels)`` tokens each, request by request."""
    if levels[0] is None:
        return None
    width = max(2, len(levels))
    levels = levels + [levels[-1]] * (width - len(levels))

    def join(name: str) -> torch.Tensor:
        stacked = torch.stack([getattr(level, name) for level in levels], dim=1)
        return stacked.flatten(0, 1) if stacked.numel() else stacked

    return LogprobsTensors(
        join("logprob_token_ids"), join("logprobs"), join("selected_token_ranks")
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def _tracks_thinking(metadata: Any) -> bool:
    holder = metadata.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()
