"""Model Runner V2's steps in the terms of :class:`TreeVerifier`: chains, which vLLM verifies.

:mod:`.v2_trees` adds trees. vLLM schedules the same number N of draft tokens for every request, as
placeholders, before it knows them; this keeps asynchronous scheduling and full CUDA graphs. A
shorter draft is filled up with tokens that verification rejects unseen::

    row of a request   [ drafted tokens ][ 0 ... 0 ]     N tokens
    num_drafted          number of the former
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_trie.drafters import DraftRequest
from vllm_trie.vllm_hooks.worker.drafting.neural_v2 import V2Chains
from vllm_trie.vllm_hooks.worker.drafting.requests import draft_request, ends_with
from vllm_trie.vllm_hooks.worker.stats import FILLERS_ATTRIBUTE, STATS_ATTRIBUTE
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_trie.drafters.union import TrieUnionDrafter

_FILLER = 0
"""Any token of the vocabulary: the model computes it, verification never accepts it."""


@dataclass(slots=True)
class _Request:
    """A request's text on the host, where drafters read it; the runner's own is on the device.

    Attributes:
        data: as the scheduler sent it.
        token_ids: int32 [capacity], the text so far and room for the rest of it.
        num_tokens: length of the text.
        has_ended: whether the text ends here. Scheduled ahead, the request may run once more.
        drafted: the draft tokens of the next step.
    """

    data: NewRequestData
    token_ids: np.ndarray
    num_tokens: int
    has_ended: bool = False
    drafted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, data: NewRequestData, max_model_len: int) -> _Request:
        text = data.prefill_token_ids or []
        token_ids = np.empty(max(max_model_len, len(text)), dtype=np.int32)
        token_ids[: len(text)] = text
        return cls(data, token_ids, len(text))

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.data.prompt_len

    def extend(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add sampled tokens to the text; return those before its end."""
        params = self.data.sampling_params
        assert params is not None
        taken = 0
        while taken < len(tokens) and not self.has_ended and self.num_tokens < len(self.token_ids):
            token = tokens[taken]
            self.token_ids[self.num_tokens] = token
            self.num_tokens += 1
            taken += 1
            num_output = self.num_output_tokens
            is_last = num_output == params.max_tokens
            self.has_ended = is_last or ends_with(params, token, num_output)
        return tokens[:taken]


class V2Adapter:
    """Follows a model runner for its verifier and turns drafts into rows of draft tokens.

    Args:
        trees: the verifier; without a node budget, as vLLM verifies N tokens for each request
            whatever was drafted.
        req_states: the runner's.
        device: of the model.

    Attributes:
        num_drafted: int64 [max_num_seqs] on the device, drafted tokens of each request, by the
            runner's request index.
    """

    def __init__(self, trees: TreeVerifier, req_states: RequestState, device: torch.device) -> None:
        self.trees = trees
        self.num_drafted = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self._req_states = req_states
        self._device = device
        self._requests: dict[str, _Request] = {}
        self._fillers: dict[str, int] = {}  # of the step that runs, by request id
        self._is_drafting = False
        # On their way to the host: the sampled tokens, their numbers, and the event to wait for.
        self._sampled: tuple[np.ndarray, np.ndarray] | None = None
        self._copied = torch.cuda.Event(blocking=True)
        self._chains: V2Chains | None = None

    def take_neural_drafter(self, speculator: Any) -> None:
        """Hand vLLM's speculator to the union that it is a part of."""
        union = cast("TrieUnionDrafter", self.trees.guard.drafter)
        assert union.neural is not None
        length = min(union.neural.options.num_speculative_tokens, union.context.num_nodes)
        self._chains = union.neural.source = V2Chains(speculator, length, self.propose)
        union.gate = None  # its passes are made in every step

    def attach(self, runner: GPUModelRunner) -> None:
        """Take part in a runner's verification, once its model is loaded."""
        assert runner.rejection_sampler is not None
        verifier: Any = DraftedOnly(runner.rejection_sampler, self.num_drafted)
        runner.rejection_sampler = verifier

    def attach_cache(self, runner: GPUModelRunner) -> None:
        """Learn of the runner's KV cache, each time that it is made."""
        if self._chains is not None:
            self._chains.shorten()

    def calibrate(self) -> None:
        """Begin to draft: requests before this call are the warm-up's, not worth learning from."""
        self._is_drafting = True

    def add_requests(self, new_requests: Sequence[NewRequestData]) -> None:
        """Take in requests that start, or start again after a preemption."""
        for data in new_requests:
            self._requests[data.req_id] = _Request.of(data, self._req_states.max_model_len)
        if self.trees.recorder is not None:
            self.trees.recorder.begin(new_requests)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self.trees.release(request_id)

    def begin_step(self, scheduler_output: SchedulerOutput, request_ids: Sequence[str]) -> None:
        """Tell the verifier what is scheduled of each request's draft."""
        drafts: dict[str, list[int]] = {}
        self._fillers = {}
        for request_id, places in scheduler_output.scheduled_spec_decode_tokens.items():
            drafted = self._requests[request_id].drafted[: len(places)]
            self._fillers[request_id] = len(places) - len(drafted)
            if drafted:
                drafts[request_id] = drafted
        self.trees.begin_step(request_ids, drafts, scheduler_output.total_num_scheduled_tokens)

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """Put the step's trees in place, once the KV slots follow from flat positions.

        Args:
            batch: of the step; positions of nodes are changed.
            slot_mappings: int64 [cache groups, tokens of the step].
        """

    def keep_sampled(self, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Start the copy of the step's tokens to the host; :meth:`propose` waits for it.

        Args:
            tokens: int64 [requests, up to N + 1].
            num_sampled: int32 [requests].
        """
        self._sampled = async_copy_to_np(tokens), async_copy_to_np(num_sampled)
        self._copied.record()

    def propose(
        self, batch: InputBatch, hidden_states: torch.Tensor, max_nodes: int
    ) -> torch.Tensor:
        """Draft for the next step; the one place of a step that waits for the device.

        Args:
            batch: of the step.
            hidden_states: [tokens of the step, hidden_size].
            max_nodes: the scheduler's limit on a draft.

        Returns:
            int64 [requests, N] on the device.
        """
        self._copied.synchronize()
        assert self._sampled is not None
        tokens, counts = self._sampled
        requests = [self._requests[request_id] for request_id in batch.req_ids]
        new_tokens = [
            request.extend(row[:count])
            for request, row, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True)
        ]
        self.trees.observe_outputs(new_tokens, self._node_argmax(batch))
        self.trees.end_step(new_tokens)
        start = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in requests]
        if self._is_drafting:
            wanted = self._draft_requests(batch.req_ids, new_tokens, max_nodes)
            rows = self._verified_rows(batch, hidden_states)
            drafts = self.trees.draft(wanted, len(requests), rows, start)
        for request, draft in zip(requests, drafts, strict=True):
            request.drafted = draft
        return self._on_device(batch, drafts)

    def _draft_requests(
        self, request_ids: Sequence[str], new_tokens: Sequence[Sequence[int]], max_nodes: int
    ) -> dict[int, DraftRequest]:
        """Return the requests that get a draft, by batch index."""
        wanted = {}
        for index, request_id in enumerate(request_ids):
            request = self._requests[request_id]
            params = request.data.sampling_params
            if not new_tokens[index] or request.has_ended or params is None:
                continue
            text = request.token_ids[: request.num_tokens]
            text.flags.writeable = False
            drafted = draft_request(
                request_id,
                request.data,
                text,
                request.data.prompt_len,
                request.num_output_tokens,
                self._req_states.max_model_len,
                max_nodes,
                chain_only=self._needs_chain(params),
            )
            if drafted is not None:
                wanted[index] = drafted
        return wanted

    def _needs_chain(self, params: SamplingParams) -> bool:
        """Whether a request's draft must be a chain; those of structured outputs always are."""
        return True

    def _verified_rows(self, batch: InputBatch, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the last committed token and of each drafted one."""
        if not self.trees.guard.drafter.needs_hidden_states:
            return hidden_states[:0]
        rows = async_tensor_h2d(self._drafted_rows(batch), device=self._device)
        return hidden_states[batch.logits_indices[rows]]

    def _drafted_rows(self, batch: InputBatch) -> np.ndarray:
        """Return int64 [rows], the rows of logits without those of fillers."""
        num_rows = [len(tree.token_list) + 1 for tree in self.trees.step_trees]
        first_rows = batch.cu_num_logits_np[:-1]
        return np.concatenate(
            [first + np.arange(n) for first, n in zip(first_rows, num_rows, strict=True)]
        )

    def _node_argmax(self, batch: InputBatch) -> list[int] | None:
        """Return the argmax of each of these rows, None if it is unknown."""
        return None

    def _on_device(self, batch: InputBatch, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        width = self._req_states.num_speculative_steps
        packed = np.full((len(drafts), width + 1), _FILLER, dtype=np.int64)
        for row, draft in zip(packed, drafts, strict=True):
            row[: len(draft)] = draft
            row[width] = len(draft)
        on_device = async_tensor_h2d(packed, device=self._device)
        self.num_drafted[batch.idx_mapping] = on_device[:, width]
        return on_device[:, :width]

    def finish(self, output: Any) -> None:
        """Attach the step's statistics to the output that vLLM sends to the scheduler."""
        setattr(output.model_runner_output, FILLERS_ATTRIBUTE, self._fillers)
        stats = self.trees.take_stats()
        if stats is not None:
            setattr(output.model_runner_output, STATS_ATTRIBUTE, stats)


class DraftedOnly:
    """vLLM's rejection sampler, which may accept the tokens that were drafted and no fillers.

    A rejected filler leaves the target's distribution as it is, so that a request without a draft
    gets the token that it would get without speculation, sampled ones with a seed included.
    """

    def __init__(self, rejection_sampler: RejectionSampler, num_drafted: torch.Tensor) -> None:
        self._rejection_sampler = rejection_sampler
        self._num_drafted = num_drafted

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        # Row i of a request verifies its draft token i - 1; row 0 belongs to its last token.
        num_drafted = self._num_drafted[input_batch.expanded_idx_mapping]
        fillers = input_batch.expanded_local_pos > num_drafted
        if invalid_drafts is not None:
            fillers |= invalid_drafts
        return self._rejection_sampler(logits, input_batch, draft_logits, fillers)
