"""A search's hypotheses as the outputs of its request.

A search is one request to vLLM, from the front end to the scheduler, and its answer comes in one
piece. Only then each hypothesis gets what vLLM gives to each of the ``n`` outputs of a request:
text, log-probabilities, a ``CompletionOutput``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.outputs import CompletionOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from vllm_trie.hooks.frontend.answers import take_along
from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.wire import SEARCH_KEY, is_search
from vllm_trie.searches.engine.frontend.metrics import record_search
from vllm_trie.searches.engine.search_wire import HypothesisAnswer, SearchAnswer, beam_spec

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

_engine = of_beams("v1.engine.")
_parent = of_beams("v1.engine.parallel_sampling:ParentRequest.")
_parent("n", "overridden", "the hypotheses that the search returns")

served: ContextVar[ServerCall | None] = ContextVar("served", default=None)
"""The call of the server that is being answered."""
PROMPT_TAIL = 64
"""Tokens of the prompt that are decoded with each hypothesis. Decoders look back a few tokens."""


class ServerCall(NamedTuple):
    """A request to the server, and its searches so far, in the order of their prompts."""

    request: Any
    searches: list[SearchOutputs]


class SearchOutputs(ParentRequest):
    """The outputs of a search, where vLLM collects those of a request with several.

    Attributes:
        beams: What ``CompletionOutput.beam`` has of each hypothesis; empty without a result.
    """

    def __init__(
        self, request: EngineCoreRequest, state: RequestState, tokenizer: TokenizerLike | None
    ) -> None:
        """Make the outputs of a request, whose result will be with its `state`."""
        super().__init__(request)
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None
        assert prompt is not None
        self._n, _, constraint = beam_spec(params)
        self._ends_with_stop_token = constraint is None or bool(constraint.stop_token_ids(params))
        self._state = state
        self._tokenizer = tokenizer if params.detokenize else None
        self._request = copy(request)
        size = PROMPT_TAIL
        if self._tokenizer is not None:
            while size < len(prompt) and not self._tokenizer.decode(
                prompt[-size:], skip_special_tokens=params.skip_special_tokens
            ):
                size *= 2
        self._request.prompt_token_ids = prompt[-size:]
        self.beams: list[Any] = []
        if (call := served.get()) is not None:
            call.searches.append(self)

    @property
    def n(self) -> int:
        return self._n

    @_parent.overrides("the hypotheses of a search are the outputs of its request")
    def get_outputs(
        self, child_request_id: str, completion_output: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        if not completion_output.finished():
            return [], False
        result = vars(self._state).get(SEARCH_KEY)
        if result is None:  # refused or aborted
            return [replace(completion_output, index=index) for index in range(self.n)], True
        answer = SearchAnswer(*result)
        if answer.report is not None:
            record_search(answer.report)
        logprobs = _logprobs_of(answer)
        outputs: list[CompletionOutput] = []
        start = 0
        for hypothesis in (HypothesisAnswer(*columns) for columns in answer.hypotheses):
            end = start + hypothesis.num_tokens
            output = replace(
                completion_output,
                index=len(outputs),
                token_ids=completion_output.token_ids[start:end],
                finish_reason=str(FinishReason(hypothesis.finish_reason)),
                stop_reason=hypothesis.stop_reason,
            )
            self._complete(output, logprobs and logprobs.slice_request(start, end - start))
            # A trace of the search, if asked for, is the first hypothesis' own.
            beam = {**hypothesis.beam, **answer.shared}
            vars(output).update(hypothesis.beam, beam=beam)
            outputs.append(output)
            start = end
        self.beams = [output.beam for output in outputs]  # type: ignore[attr-defined]
        self.max_num_generation_tokens = max(len(output.token_ids) for output in outputs)
        return outputs, True

    @_parent.overrides("the longest hypothesis, not all of them together")
    def observe_num_generation_tokens(self, num_generation_tokens: int) -> int:
        return self.max_num_generation_tokens

    def _complete(self, output: CompletionOutput, logprobs: LogprobsLists | None) -> None:
        """Add text and log-probabilities as vLLM does."""
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, self._request)
        ends_with_stop_token = output.finish_reason == "stop" and self._ends_with_stop_token
        stop = detokenizer.update([*output.token_ids], ends_with_stop_token)
        if stop:
            output.finish_reason, output.stop_reason = "stop", stop
        output.text = detokenizer.get_next_output_text(True, False)
        output.token_ids = detokenizer.output_token_ids
        num_tokens = len(output.token_ids)
        if output.weight_versions:
            spans = [replace(span, end=num_tokens) for span in output.weight_versions if num_tokens]
            output.weight_versions = spans
        if logprobs is not None:
            processor = LogprobsProcessor.from_new_request(self._tokenizer, self._request)
            new_logprobs = logprobs.slice_request(0, num_tokens)
            processor.update_from_output(EngineCoreOutput("", [], new_logprobs))
            output.logprobs = processor.logprobs


def _logprobs_of(answer: SearchAnswer) -> LogprobsLists | None:
    if answer.logprobs is None:
        return None
    token_ids, values, ranks = map(np.frombuffer, answer.logprobs, (np.int32, np.float32, np.int64))
    shape = len(ranks), len(token_ids) // max(len(ranks), 1)  # a search may end without any
    return LogprobsLists(token_ids.reshape(shape), values.reshape(shape), ranks)


@_engine.wraps(
    "output_processor:OutputProcessor.add_request",
    "the outputs of a search come out of one request",
)
def add_request(
    original: Callable[..., None],
    self: OutputProcessor,
    request: EngineCoreRequest,
    *args: object,
    **kwargs: object,
) -> None:
    original(self, request, *args, **kwargs)
    if is_search(request.sampling_params):
        state = self.request_states[request.request_id]
        state.detokenizer = IncrementalDetokenizer()  # for all hypotheses, without a text
        state.parent_req = SearchOutputs(request, state, self.tokenizer)
        state.n = state.parent_req.n


take_along(_engine, SEARCH_KEY, "takes a search's result out of the field it travels in")
