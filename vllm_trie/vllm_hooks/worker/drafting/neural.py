"""Chains of a trained drafter: vLLM's own proposer, fed with the accepted tokens of each request.

The proposer's KV cache has a row for each token of a request whose KV the model has computed; an
EAGLE or MTP drafter makes it from the model's hidden state there and the token after it. Rows of
nodes that were not accepted never get in. Rows that are not in the cache yet wait: a request that
the proposer does not draft for costs no forward pass, and the next draft feeds what has waited::

    committed text   [ rows in the proposer's cache | rows that wait ][ newest token ]
    hidden states                                     kept here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_trie.device_copy import to_device
from vllm_trie.drafters.neural import Chains

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_trie.drafters import VerifiedStep

MAX_WAITING = 64
"""Rows of a request that may wait. More hidden states would take memory, and a later request that
finds the text in the prefix cache finds no rows of the drafter's there."""


class StepStates(NamedTuple):
    """What vLLM's runner hands its drafters after a step."""

    hidden_states: torch.Tensor
    """[num_tokens or more, hidden_size]."""
    aux_hidden_states: list[torch.Tensor] | None
    """Of inner layers, for EAGLE-3."""
    attention: CommonAttentionMetadata
    """Of the drafter's KV cache group."""


class _Waiting:
    """Rows of a request that are not in the proposer's cache.

    Attributes:
        start, end: Their positions.
        states: Hidden states of the rows, in parts; empty for proposers that read none.
        is_due: Whether they are to be fed in this step whatever is drafted.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.states: list[torch.Tensor] = []
        self.is_due = False

    def add(self, count: int, states: torch.Tensor | None) -> None:
        self.end += count
        if states is not None:
            self.states.append(states)

    def drop(self) -> None:
        """Give up the rows; the request is never drafted for again."""
        self.start = self.end
        self.states.clear()

    def take(self, count: int) -> torch.Tensor | None:
        """Return the first `count` rows' hidden states; the others wait on."""
        self.start += count
        if not self.states:
            return None
        states = self.states[0] if len(self.states) == 1 else torch.cat(self.states)
        self.states = [states[count:]] if count < len(states) else []
        return states[:count]


class _Piece(NamedTuple):
    """Rows of one request in one call of the proposer."""

    row: int
    """The request's index in the batch."""
    start: int
    end: int
    states: torch.Tensor | None


class NeuralChains:
    """The source of a :class:`~vllm_trie.drafters.neural.NeuralDrafter`'s chains.

    Args:
        runner: Of the engine.
        proposer: vLLM's, with weights. Its greedy sampling is replaced by one that keeps
            probabilities.
        length: Tokens of a chain.
        num_alternatives: Further tokens at each depth.
    """

    def __init__(
        self, runner: GPUModelRunner, proposer: Any, length: int, num_alternatives: int
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._length = length
        self._width = 1 + num_alternatives
        self._reads_states: bool = proposer.pass_hidden_states_to_model
        # Further rows that a draft model's input has for each request.
        self._extra_rows = int(proposer.needs_extra_input_slots)
        self._limit = min(runner.max_model_len, runner.effective_drafter_max_model_len)
        self._waiting: dict[str, _Waiting] = {}
        self._sampled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attention: CommonAttentionMetadata | None = None
        proposer._greedy_sample = self._sample

    def observe(
        self,
        states: StepStates,
        new_tokens: Sequence[Sequence[int]],
        last_step: Callable[[str], VerifiedStep],
    ) -> None:
        """Note the rows that a step has committed.

        Args:
            states: Of the step.
            new_tokens: Of each request of the batch; none while its prefill goes on.
            last_step: Returns what was accepted of a request in the step.
        """
        batch = self._runner.input_batch
        ids = batch.req_ids
        starts = states.attention.query_start_loc_cpu.tolist()
        kept: list[np.ndarray] = []
        for index, request_id in enumerate(ids):
            step = last_step(request_id)
            first_node = starts[index + 1] - step.tree.num_nodes
            flat = np.arange(starts[index], first_node)
            kept.append(np.concatenate((flat, first_node + np.array(step.accepted, np.int64))))
        self._attention = states.attention
        parts = self._kept_states(states, kept)
        for index, (request_id, rows, part) in enumerate(zip(ids, kept, parts, strict=True)):
            computed = int(batch.num_computed_tokens_cpu[index])
            waiting = self._waiting.get(request_id)
            if waiting is None or waiting.end != computed:  # new, or preempted and computed again
                waiting = self._waiting[request_id] = _Waiting(computed)
            waiting.add(len(rows), part)
            if not self._fits(index):
                waiting.drop()
            waiting.is_due = waiting.end - waiting.start > MAX_WAITING or not new_tokens[index]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._waiting.pop(request_id, None)

    def draft(self, request_ids: Sequence[str]) -> Chains:
        """Draft chains, after feeding the rows of these requests and those that are due."""
        indices = {request_id: i for i, request_id in enumerate(self._runner.input_batch.req_ids)}
        batch_indices = [indices[request_id] for request_id in request_ids]
        shape = len(indices), self._length, self._width
        tokens = np.full(shape, -1, dtype=np.int32)
        probabilities = np.zeros(shape, dtype=np.float32)
        fed = {index for index in batch_indices if self._fits(index)}.union(self._due())
        for pieces in self._calls(sorted(fed)):
            # Of a request in several pieces, the last one's chain stays.
            rows = [piece.row for piece in pieces]
            tokens[rows], probabilities[rows] = self._call(pieces, self._length)
        return Chains(tokens[batch_indices], probabilities[batch_indices])

    def catch_up(self) -> None:
        """Feed the rows that are due and were not fed by a draft."""
        for pieces in self._calls(self._due()):
            self._call(pieces, 0)

    def _kept_states(
        self, states: StepStates, kept: Sequence[np.ndarray]
    ) -> Sequence[torch.Tensor | None]:
        """Return the hidden states of each request's rows, copied."""
        if not self._reads_states:
            return [None] * len(kept)
        hidden = states.hidden_states
        # A model may have others for its MTP layers (DeepSeek V4).
        of_model = getattr(self._runner.get_model(), "get_mtp_target_hidden_states", None)
        if of_model is not None and (other := of_model()) is not None:
            hidden = other
        indices = to_device(np.concatenate(kept), hidden.device)
        if self._runner.use_aux_hidden_state_outputs and states.aux_hidden_states is not None:
            chosen = torch.cat([aux[indices] for aux in states.aux_hidden_states], dim=-1)
        else:
            chosen = hidden[indices]
        parts: tuple[torch.Tensor, ...] = chosen.split([len(rows) for rows in kept])
        return parts

    def _fits(self, index: int) -> bool:
        """Return whether a request's chain stays within the drafter's length limit."""
        request_id = self._runner.input_batch.req_ids[index]
        if self._runner.requests[request_id].prompt_token_ids is None:  # embeddings
            return False
        return self._waiting[request_id].end + self._length < self._limit

    def _due(self) -> list[int]:
        ids = self._runner.input_batch.req_ids
        return [i for i, request_id in enumerate(ids) if self._waiting[request_id].is_due]

    def _calls(self, indices: Sequence[int]) -> list[list[_Piece]]:
        """Cut the rows of some requests into calls that fit the proposer's buffers."""
        calls: list[list[_Piece]] = []
        room = 0
        for index in indices:
            waiting = self._waiting[self._runner.input_batch.req_ids[index]]
            waiting.is_due = False
            while waiting.start < waiting.end:
                if room <= self._extra_rows:
                    calls.append([])
                    room = self._proposer.max_num_tokens
                start = waiting.start
                count = min(waiting.end - start, room - self._extra_rows)
                calls[-1].append(_Piece(index, start, start + count, waiting.take(count)))
                room -= count + self._extra_rows
        return calls

    def _call(self, pieces: Sequence[_Piece], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed rows in one call of the proposer, and draft `length` tokens after each piece.

        Returns:
            Tokens and probabilities, [pieces, length, width].
        """
        runner, batch = self._runner, self._runner.input_batch
        text = batch.token_ids_cpu
        tokens = np.concatenate([text[p.row, p.start : p.end] for p in pieces])
        positions = np.concatenate([np.arange(p.start, p.end) for p in pieces])
        following = np.array([text[p.row, p.end] for p in pieces], dtype=np.int32)
        device = runner.device
        on_device = to_device(positions, device)
        attention = self._attention_of(pieces, on_device)
        states: Any = None
        if self._reads_states:
            states = torch.cat([p.states for p in pieces if p.states is not None])
        self._sampled.clear()
        self._proposer.propose(
            num_speculative_tokens=length,
            target_token_ids=to_device(tokens.astype(np.int32), device),
            target_positions=on_device,
            target_hidden_states=states,
            next_token_ids=to_device(following, device),
            token_indices_to_sample=None,
            common_attn_metadata=attention,
            sampling_metadata=batch.sampling_metadata,
        )
        if not length:
            return np.empty((len(pieces), 0, 0), np.int32), np.empty((len(pieces), 0, 0))
        drawn, rates = zip(*self._sampled, strict=True)
        tokens_out = torch.stack(drawn, dim=1).cpu().numpy().astype(np.int32)
        return tokens_out, torch.stack(rates, dim=1).cpu().numpy()

    def _attention_of(
        self, pieces: Sequence[_Piece], positions: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Return the metadata of a batch of these rows."""
        assert self._attention is not None
        counts = [piece.end - piece.start for piece in pieces]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        ends = torch.tensor([piece.end for piece in pieces], dtype=torch.int32)
        device = self._runner.device
        rows = np.array([piece.row for piece in pieces])
        tables = self._attention.block_table_tensor[to_device(rows, device)]
        block_size = self._proposer.block_size
        owners = to_device(np.repeat(np.arange(len(pieces)), counts), device)
        blocks = tables[owners, positions // block_size].long()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device, copy=True),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device, copy=True),
            num_reqs=len(pieces),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables,
            slot_mapping=blocks * block_size + positions % block_size,
            causal=True,
            seq_lens_cpu_upper_bound=ends,
        )

    def _sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take the likeliest token of each row, in place of the proposer's greedy sampling."""
        proposer = self._proposer
        logits = proposer.model.compute_logits(hidden_states)
        if proposer.use_heterogeneous_vocab:
            logits = proposer.vocab_mapping.constrain_draft_logits(logits)
        top = logits.float().topk(self._width, dim=-1)
        probabilities = (top.values - logits.float().logsumexp(-1, keepdim=True)).exp()
        tokens: torch.Tensor = top.indices
        # Of equal logits, vLLM drafts the first.
        tokens[:, 0] = logits.argmax(-1)
        if proposer.use_heterogeneous_vocab:
            tokens = proposer.vocab_mapping.map_draft_to_target_ids(tokens)
        self._sampled.append((tokens, probabilities))
        return tokens[:, 0]
