"""Model Runner V2 with arrays in place of a device, around the real overrides and adapter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from tests.unit.drafters.support import VOCAB, make_context
from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.runners.v2 import RunnerV2Mixin
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.drafts.engine.verifier import TreeVerifier
from vllm_trie.tree import TokenTree

WIDTH = 4
NUM_SLOTS = 8


class Stock:
    """vLLM's part of the runner, in its order."""

    device = torch.device("cpu")
    aux_output_connector = cudagraph_manager = adaptive_verification = None
    use_pp = False
    execute_model_state: Any = None
    max_nodes = WIDTH
    adapter: V2Adapter
    _proposed: Sequence[str] = ()

    def execute_model(self, output: SchedulerOutput) -> None:
        self.finish_requests(output)
        if output.total_num_scheduled_tokens:
            self.execute_model_state = batch = self.prepare_inputs(output)
            if not self.adapter.chain_only:
                slots = self.on_device(range(1 + len(batch.positions)))
                self.adapter.resume("positions", [slots])

    def finish_requests(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.indices.pop(request_id, None)
        for data in output.scheduled_new_reqs:
            free = set(range(NUM_SLOTS)) - set(self.indices.values())
            self.indices.setdefault(data.req_id, min(free, default=-1))

    def prepare_inputs(self, output: SchedulerOutput) -> Any:
        ids, drafts = [*output.num_scheduled_tokens], output.scheduled_spec_decode_tokens
        num_drafts = np.array([len(drafts.get(request_id, ())) for request_id in ids])
        first_rows = np.cumsum([0, *(1 + num_drafts)])
        num_rows = first_rows[-1]
        return SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_draft_tokens=int(num_drafts.sum()),
            num_draft_tokens_per_req=num_drafts,
            num_scheduled_tokens=1 + num_drafts,
            query_start_loc_np=first_rows,
            cu_num_logits_np=first_rows,
            cu_num_logits=self.on_device(first_rows, np.int32),
            idx_mapping=self.on_device([self.indices[request_id] for request_id in ids]),
            positions=self.on_device(range(num_rows)),
            input_ids=self.on_device(range(num_rows), np.int32),
            logits_indices=self.on_device(range(1, 1 + num_rows)),
        )

    def sample_tokens(self, grammar: Any) -> Any:
        batch, self.execute_model_state = self.execute_model_state, None
        # Row r of the logits has hidden state [r].
        hidden_states = self.on_device(range(-1, len(batch.positions)), np.float32)[:, None]
        self.sample(hidden_states, batch, grammar)
        drafts = self.adapter.propose(batch, hidden_states, self.max_nodes)
        self.write(batch.idx_mapping, drafts)
        self._proposed = batch.req_ids
        return SimpleNamespace(model_runner_output=SimpleNamespace())

    def take_draft_token_ids(self) -> Any:
        rows = [[0] * WIDTH for _ in self._proposed]
        return SimpleNamespace(req_ids=self._proposed, draft_token_ids=rows)

    def sample(self, hidden_states: Any, batch: Any, grammar: Any) -> Any:
        tokens, counts = self.verify(batch)
        return SimpleNamespace(sampled_token_ids=tokens), counts, None

    def on_device(self, values: Any, dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype))


class Steps(RunnerV2Mixin, Stock):  # type: ignore[misc]
    """Steps whose tokens are given."""

    max_model_len = 40

    def __init__(
        self,
        drafter: Drafter | None = None,
        adapter_class: type[V2Adapter] = V2Adapter,
        launches_ahead: bool = False,
    ) -> None:
        self.drafter: Any = drafter or OneToken()
        guard = GuardedDrafter(self.drafter, VOCAB, 30.0, logging.getLogger("tests.v2"))
        self.indices: dict[str, int] = {}
        self.states: Any = SimpleNamespace(
            max_num_reqs=NUM_SLOTS,
            max_model_len=self.max_model_len,
            num_speculative_steps=WIDTH,
            draft_tokens=torch.zeros(NUM_SLOTS, WIDTH, dtype=torch.int64, device=self.device),
            req_id_to_index=self.indices,
        )
        adapter = adapter_class(TreeVerifier(guard), self.states, self.device, launches_ahead)
        self.speculator: Any = SimpleNamespace(adapter=adapter)
        adapter.runner = self
        adapter.start_drafting()
        self._new: list[NewRequestData] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 30) -> None:
        """Let the next step have a new request."""
        request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), None)
        self._new.append(NewRequestData.from_request(request, (), prompt))

    def run_step(self, sampled: Mapping[str, list[int]], scheduled: int = 0) -> None:
        """Run a step with these tokens sampled, and as many places for each draft."""
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, self._new = self._new, []
        output.num_scheduled_tokens = dict.fromkeys(sampled, 1 + scheduled)
        output.total_num_scheduled_tokens = len(sampled) * (1 + scheduled)
        if scheduled:
            output.scheduled_spec_decode_tokens = {name: [-1] * scheduled for name in sampled}
        self._sampled = sampled
        self.execute_model(output)
        self.sample_tokens(None)

    def verify(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's tokens, int [requests, N + 1], and how many of each row there are."""
        tokens = np.full((batch.num_reqs, WIDTH + 1), -7)
        for row, some in zip(tokens, self._sampled.values(), strict=True):
            row[: len(some)] = some
        counts = [len(some) for some in self._sampled.values()]
        return self.on_device(tokens), self.on_device(counts)

    def write(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write what was proposed after a step, placeholders most often."""
        self.states.draft_tokens[slots] = drafts


class OneToken(Drafter):
    """Drafts one token."""

    name = "one_token"
    Options = DrafterOptions

    def __init__(self) -> None:
        super().__init__(DrafterOptions(), make_context())

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [TokenTree.from_lists([5], [-1])] * len(requests)
