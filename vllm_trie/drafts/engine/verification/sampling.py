"""Lossless verification: walk down each tree with the target model's own samples.

At every node vLLM's sampler draws the target's token from the target's distribution there. If a
child carries that token, the walk goes down; otherwise the token ends the step. Each output token
is thus a sample of the target given its prefix, at any temperature. For a deterministic drafter the
chance of going down is that of multi-branch rejection sampling (SpecInfer, Miao et al. 2024,
section 4.3, with draft probabilities of one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from vllm_trie.attention.device_copy import to_device
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.tree import TokenTree, accept_all

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class TreeSample(NamedTuple):
    """A step's verified tokens, by request of the batch."""

    token_ids: list[list[int]]
    """Output tokens: the accepted nodes' and the bonus token."""
    accepted: list[list[int]]
    """Accepted node indices, root first."""
    logprobs: LogprobsTensors | None
    """Those of ``num_requests * width`` tokens, width = the longest request's, padded with any
    values."""

    def padded(self, device: torch.device) -> SamplerOutput:
        """Return vLLM's form of the sample: padded with -1 to at least two columns.

        vLLM reads a single column as the output of a step without speculation.
        """
        counts = np.array(list(map(len, self.token_ids)))
        padded = np.full((len(counts), max(2, counts.max())), -1, dtype=np.int32)
        padded[np.arange(padded.shape[1]) < counts[:, None]] = [*chain(*self.token_ids)]
        token_ids = to_device(padded, device)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=self.logprobs)


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Return whether every request's next token is the argmax of the raw logits."""
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


def sample_greedy(argmax: np.ndarray, trees: Sequence[TokenTree]) -> TreeSample:
    """Walk all trees by the argmax of each logits row.

    Args:
        argmax: int, of every logits row. A request owns ``N + 1`` of them: for its last committed
            token and for each node.
        trees: Of each request.
    """
    return TreeSample(*accept_all(trees, argmax), None)


def sample_levels(
    sampler: Sampler,
    logits: torch.Tensor,
    first_rows: Sequence[int],
    trees: Sequence[TokenTree],
    metadata: SamplingMetadata,
    outputs: Sequence[list[int]],
) -> TreeSample:
    """Walk all trees together, one call of vLLM's sampler per level.

    A request's own generator is used only while its walk goes on. Its accepted tokens are output
    for the rest of the walk, and logits processors are told so before each level as before each
    step: every random number is drawn and every processor applied exactly as in plain decoding.

    Args:
        logits: [logits rows, vocab_size] of the target.
        first_rows: The first row of each request; the last entry is the number of all rows.
        trees: As for :func:`sample_greedy`.
        outputs: The requests' output tokens, the lists that vLLM and its logits processors hold;
            they are longer during the call.
    """
    num_requests = len(trees)
    lengths = [len(outputs[index]) for index in range(num_requests)]
    children = [_children(tree) for tree in trees]
    node = [-1] * num_requests
    token_ids: list[list[int]] = [[] for _ in trees]
    accepted: list[list[int]] = [[] for _ in trees]
    logprobs: list[LogprobsTensors | None] = []
    walking, firsts = set(range(num_requests)), np.array(first_rows[:-1])
    try:
        while walking:
            rows = to_device(firsts + np.array(node) + 1, logits.device)
            output = sampler(logits=logits[rows], sampling_metadata=_metadata_of(metadata, walking))
            logprobs.append(output.logprobs_tensors)
            sampled = output.sampled_token_ids.view(-1).tolist()
            for index in sorted(walking):
                token_ids[index].append(sampled[index])
                child = children[index].get((node[index], sampled[index]))
                if child is None:
                    walking.discard(index)
                else:
                    accepted[index].append(child)
                    outputs[index].append(sampled[index])
                    node[index] = child
            if walking:
                for processor in metadata.logitsprocs.all:
                    processor.update_state(None)
    finally:
        for index, length in enumerate(lengths):
            del outputs[index][length:]
    return TreeSample(token_ids, accepted, _interleave(logprobs))


def _children(tree: TokenTree) -> dict[tuple[int, int], int]:
    edges = zip(tree.parent_list, tree.token_list, strict=True)
    never = tree.never_accept
    return {edge: node for node, edge in enumerate(edges) if never is None or not never[node]}


def _metadata_of(metadata: SamplingMetadata, walking: set[int]) -> SamplingMetadata:
    """Return the sampling metadata of a level: generators of the requests that walk, no drafts."""
    generators = {i: g for i, g in metadata.generators.items() if i in walking}
    return replace(metadata, generators=generators, spec_token_ids=None)


def _interleave(levels: list[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Reorder one entry per level to ``max(2, levels)`` tokens per request."""
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


def _is_idle(processor: object) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def _tracks_thinking(metadata: SamplingMetadata) -> bool:
    holder = metadata.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()


@Symbols("v1.worker.gpu_model_runner:", "vLLM's rejection sampler applies logits processors").wraps(
    "build_logitsprocs",
    "min_p, logit_bias and custom processors, which vLLM leaves out with any speculation",
    scope="tree_runner",
)
def build_logitsprocs(
    original: Callable[..., LogitsProcessors],
    vllm_config: VllmConfig,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Sequence[object] = (),
) -> LogitsProcessors:
    """Give an engine whose trees the sampler walks the processors of one without speculation."""
    without = copy(vllm_config)
    without.speculative_config = None
    return original(without, device, is_pin_memory, is_pooling_model, custom_logitsprocs)


@Symbols("v1.sample.rejection_sampler:", platform="cpu").wraps(
    "expand_batch_to_tokens",
    "vLLM's kernel for CPUs fills a copy of its output, so that chains were sampled with "
    "uninitialized temperatures",
    until="vLLM's `_expand_kernel_impl` writes to its output",
)
def expand_batch_to_tokens(
    original: Callable[..., torch.Tensor],
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Let vLLM's rejection sampler spread the requests' parameters over draft tokens by torch.

    The kernel that vLLM 0.32 has for CPUs computes in int64 and fills a copy: the caller gets
    uninitialized memory.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


_thinking = Symbols("v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.", platform="cpu")


@_thinking.wraps(
    "sync_batch",
    "a request that moves to the place of one that has ended inherits its thinking budget",
    until="vLLM's holder of thinking budgets forgets what it had at the end of a move",
)
def sync_batch(
    original: Callable[..., None],
    self: ThinkingBudgetStateHolder,
    batch_update: BatchUpdate | None,
) -> None:
    """Let the holder of thinking budgets forget requests whose places others take."""
    for _, index, direction in batch_update.moved if batch_update else ():
        if direction == MoveDirectionality.UNIDIRECTIONAL:
            self._state.pop(index, None)
    original(self, batch_update)


@_thinking.wraps(
    "apply_to_logits",
    "where no request has drafts, vLLM forces the token in the first row of the batch",
    until="vLLM's holder of thinking budgets counts one row for each request in such steps",
)
def apply_to_logits(
    original: Callable[..., torch.Tensor],
    self: ThinkingBudgetStateHolder,
    logits: torch.Tensor,
    predict_bonus_token: bool,
    spec_token_ids: list[list[int]] | None,
) -> torch.Tensor:
    """Let the holder find each request's row, and force its token in each step that is due.

    Args:
        spec_token_ids: None or empty where each request has one row: in steps without drafts, and
            at each level of a walk.
    """
    self.in_spec_mode = any(spec_token_ids or ())
    if predict_bonus_token or not self.in_spec_mode:  # the first call of a step
        for state in self._state.values():
            # It keeps the second call from forcing the bonus token; vLLM leaves it set until the
            # next section of thinking, which would be a token too long.
            state["bonus_token_forced"] = False
    return original(self, logits, predict_bonus_token, spec_token_ids)
