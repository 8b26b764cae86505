"""One beam request inside the scheduler: its members, its search and its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import BeamSearch, Hypothesis, num_raw_candidates
from vllm_trie.beam.search import StopStringFinder
from vllm_trie.vllm_hooks.frontend.beam_options import (
    BeamSpec,
    check_inputs,
    min_blocks,
    row_params,
    search_settings,
)


class RowOutput(NamedTuple):
    """What the model said about a row, until all rows of its group have an output.

    Attributes:
        token_id: The token the worker sampled, and has appended to its copy of the row.
        logprobs: Log-probabilities of the step's batch.
        index: The row's place in them.
    """

    token_id: int
    logprobs: LogprobsLists
    index: int


class BeamGroup:
    """State of one beam request.

    The front end knows ``n`` *members*, requests that are never queued and that receive one
    hypothesis each at the end. The engine runs *rows*, up to ``beam_width`` requests of our own
    that the front end never sees. ``rows[i]`` is row ``i`` of the search.
    """

    def __init__(
        self,
        group_id: str,
        spec: BeamSpec,
        member: Request,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        find_stop_string: StopStringFinder | None,
    ) -> None:
        params = member.sampling_params
        assert params is not None
        check_inputs(member)
        prompt = member.prompt_token_ids
        assert prompt is not None
        self.group_id = group_id
        self.n = spec.n
        self.beam_width = spec.options.beam_width
        self.members: dict[int, Request] = {}
        self.prototype = member
        self.prompt = np.asarray(prompt, dtype=np.int32)
        max_new_tokens = min(member.max_tokens, max_model_len - len(prompt))
        settings = search_settings(params, spec, max_new_tokens)
        self.search = BeamSearch(settings, prompt, find_stop_string)
        self.num_logprobs = params.logprobs
        self.num_candidates = max(
            num_raw_candidates(settings, prompt, vocab_size),
            min(params.logprobs or 0, vocab_size),
        )
        self.row_params: SamplingParams = row_params(self.num_candidates, max_new_tokens)
        self.min_blocks = min_blocks(len(prompt), self.beam_width, max_new_tokens, block_size)
        # A trie is little more than its longest path: hypotheses meet a few tokens back.
        self.expected_blocks = cdiv(len(prompt) + max_new_tokens, block_size) + 2 * self.beam_width

        self.rows: list[Request] = []
        self.outputs: dict[str, RowOutput] = {}
        self.started = False
        self.parked = False
        self.prefill_stats: Any = None
        self._num_rows_made = 0
        self._history: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def finished(self) -> bool:
        """Whether nobody waits for this group any more."""
        return all(member.is_finished() for member in self.members.values())

    def first_row(self) -> Request:
        """The row of the prompt."""
        member = self.prototype
        return Request(
            self.new_row_id(),
            member.prompt_token_ids,
            self.row_params,
            None,
            client_index=member.client_index,
            arrival_time=member.arrival_time,
            lora_request=member.lora_request,
            cache_salt=member.cache_salt,
            priority=member.priority,
            trace_headers=member.trace_headers,
            block_hasher=member._block_hasher,
        )

    def child_row(self, parent: Request, token_id: int) -> Request:
        """A row of the parent's tokens and one more; without KV until it is given some.

        A shallow copy: making a request anew would hash its whole prompt again.
        """
        row = Request.__new__(Request)
        row.__dict__.update(parent.__dict__)
        row.request_id = self.new_row_id()
        row.status = RequestStatus.PREEMPTED
        row.num_computed_tokens = 0
        row.num_in_flight_tokens = 0
        row.num_stale_output_tokens = 0
        row.num_output_placeholders = 0
        row.drop_stale_output = False
        row.num_preemptions = 0
        row.is_prefill_chunk = False
        row.spec_token_ids = []
        row.events = []
        row.prefill_stats = None
        row._output_token_ids = parent._output_token_ids.copy()
        row._all_token_ids = parent._all_token_ids.copy()
        row.output_token_ids = type(parent.output_token_ids)(row._output_token_ids)
        row.all_token_ids = type(parent.all_token_ids)(row._all_token_ids)
        row.block_hashes = parent.block_hashes.copy()
        row.append_output_token_ids(token_id)
        return row

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Candidates of all rows: int[rows, k] tokens and float32[rows, k] log-probabilities."""
        outputs = [self.outputs[row.request_id] for row in self.rows]
        # Column 0 is the sampled token, the candidates follow, best first.
        columns = slice(1, self.num_candidates + 1)
        logprobs = outputs[0].logprobs
        if all(output.logprobs is logprobs for output in outputs):
            places = [output.index for output in outputs]
            token_ids = logprobs.logprob_token_ids[places, columns]
            values = logprobs.logprobs[places, columns]
        else:  # rows whose outputs came in different steps
            token_ids = np.stack([o.logprobs.logprob_token_ids[o.index, columns] for o in outputs])
            values = np.stack([o.logprobs.logprobs[o.index, columns] for o in outputs])
        if self.num_logprobs:
            kept = slice(0, self.num_logprobs)
            self._history.append((token_ids[:, kept].copy(), values[:, kept].copy()))
        return token_ids, values

    def all_tokens(self, row: Request) -> np.ndarray:
        """int32[num_tokens]: prompt and hypothesis of a row."""
        tokens = np.empty(row.num_tokens, dtype=np.int32)
        tokens[: self.prompt.size] = self.prompt
        tokens[self.prompt.size :] = row._all_token_ids[self.prompt.size :]
        return tokens

    def logprobs_of(self, hypothesis: Hypothesis) -> LogprobsLists | None:
        """The log-probabilities that the user asked for, None if none.

        Per token: the hypothesis' own token first, then the best ``num_logprobs``.
        """
        if self.num_logprobs is None:
            return None
        count = len(hypothesis.token_ids)
        token_ids = np.empty((count, 1 + self.num_logprobs), dtype=np.int32)
        values = np.empty((count, 1 + self.num_logprobs), dtype=np.float32)
        ranks = np.empty(count, dtype=np.int64)
        for index, (step, row, position) in enumerate(hypothesis.places):
            token_ids[index, 0] = hypothesis.token_ids[index]
            values[index, 0] = hypothesis.logprobs[index]
            ranks[index] = position + 1
            if self.num_logprobs:
                step_token_ids, step_values = self._history[step]
                token_ids[index, 1:] = step_token_ids[row]
                values[index, 1:] = step_values[row]
        return LogprobsLists(token_ids, values, ranks, None)

    def new_row_id(self) -> str:
        """An id that no row has had."""
        self._num_rows_made += 1
        return f"{self.group_id}~{self._num_rows_made}"
