"""Predictions over HTTP: taken from requests, and counted in the usage of answers.

Counts come from the worker to a request's outputs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_trie.extras.predictions.request import take_prediction
from vllm_trie.extras.predictions.source import PREDICTION, PredictionCounts
from vllm_trie.hooks.frontend.answers import (
    ALL,
    answered_within,
    is_stream,
    take_along,
)
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.wire import STATS_ATTRIBUTE, TreeStats, add_counts, extra_args_of

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.outputs import ModelRunnerOutput

COUNTS = PredictionCounts._fields
"""Fields of the usage, and attributes of a ``CompletionOutput``."""
CARRIED = "vllm_trie_prediction_counts"
"""Key of a request's counts so far, in the scheduler, in its outputs and in the front end."""
_UNTIL = "vLLM takes predicted outputs"
_predicted = Symbols(until=_UNTIL)
_engine = Symbols("v1.engine.", _UNTIL)
_states: ContextVar[list[RequestState] | None] = ContextVar("states", default=None)
"""States of the requests with predictions that an answer is made of."""


@_predicted.wraps(
    "v1.core.sched.scheduler:Scheduler.update_from_output", "sends counts along with outputs"
)
def update_from_output(
    original: Callable[..., dict[int, EngineCoreOutputs]],
    self: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    """Send the counts so far along with every output of a request, not only with the last: where
    the front end finds a stop string, no other comes."""
    counted = {}
    report: TreeStats | None = getattr(model_runner_output, STATS_ATTRIBUTE, None)
    if report is not None and report.of_requests:
        for request_id, counts in report.of_requests.items():
            if (request := self.requests.get(request_id)) is not None:
                add_counts(vars(request).setdefault(CARRIED, {}), counts)
                counted[request_id] = {CARRIED: {**vars(request)[CARRIED]}}
        report.of_requests = {}
    results = original(self, scheduler_output, model_runner_output)
    if counted:
        for output in chain.from_iterable(result.outputs for result in results.values()):
            if output.request_id in counted:
                sent = output.kv_transfer_params or {}
                output.kv_transfer_params = sent | counted[output.request_id]
    return results


@_engine.wraps(
    "output_processor:OutputProcessor.add_request",
    "requests with predictions have counts before any token is drafted",
)
def add_request(
    original: Callable[..., None],
    self: OutputProcessor,
    request: EngineCoreRequest,
    *args: object,
    **kwargs: object,
) -> None:
    original(self, request, *args, **kwargs)
    if PREDICTION in extra_args_of(request.sampling_params):
        state = self.request_states[request.request_id]
        vars(state).setdefault(CARRIED, PredictionCounts(0, 0)._asdict())
        if (states := _states.get()) is not None:
            states.append(state)


take_along(_engine, CARRIED, "takes the counts of a prediction out of the field they travel in")


@_engine.wraps(
    "output_processor:RequestState._new_completion_output",
    "gives outputs the counts of their predictions",
)
def new_completion_output(
    original: Callable[..., CompletionOutput], self: RequestState, *args: Any, **kwargs: Any
) -> CompletionOutput:
    output = original(self, *args, **kwargs)
    if CARRIED in vars(self):
        vars(output).update(_counts_of(self)._asdict())
    return output


def _counts_of(state: RequestState) -> PredictionCounts:
    assert state.detokenizer is not None
    accepted, rejected = (vars(state)[CARRIED][name] for name in COUNTS)
    # Tokens behind a stop are cut off, and accepted tokens may be among them.
    num_cut = max(accepted - state.detokenizer.num_output_tokens(), 0)
    return PredictionCounts(accepted - num_cut, rejected + num_cut)


@_predicted.wraps("outputs:RequestOutput.add", "keeps the counts of outputs that become one")
def merge_outputs(
    original: Callable[..., None], self: RequestOutput, next_output: RequestOutput, aggregate: bool
) -> None:
    """Keep the later counts where a stream's reader is slower than the engine."""
    original(self, next_output, aggregate)
    newer = {output.index: vars(output) for output in next_output.outputs}
    for output in self.outputs:
        values = newer.get(output.index, {})
        vars(output).update({name: values[name] for name in COUNTS if name in values})


def summed(states: Sequence[RequestState]) -> dict[str, int]:
    """Return the counts of predictions, summed over requests that have one."""
    return dict(zip(COUNTS, map(sum, zip(*map(_counts_of, states), strict=True)), strict=True))


async def _answer(
    original: Callable[..., Any], self: Any, request: Any, *args: object, **kwargs: object
) -> Any:
    """Take a prediction from a server's request, and add its counts to the usage of the answer."""
    await take_prediction(self, request)
    if PREDICTION not in (getattr(request, "vllm_xargs", None) or {}):
        return await original(self, request, *args, **kwargs)
    states: list[RequestState] = []
    answer = await answered_within(_states, states, original, self, request, *args, **kwargs)
    if is_stream(answer):
        return _stream_with_counts(answer, states)
    usage: Any = getattr(answer, "usage", None)
    if states and hasattr(usage, "completion_tokens_details"):
        from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

        details = usage.completion_tokens_details or CompletionTokenUsageInfo()
        counted = {**dict(details), **summed(states)}
        usage.completion_tokens_details = CompletionTokenUsageInfo(**counted)
    return answer


async def _stream_with_counts(
    stream: AsyncIterator[Any], states: Sequence[RequestState]
) -> AsyncIterator[Any]:
    """Add the counts to the usage at the end of a stream."""
    async for chunk in stream:
        if states and '"choices":[]' in chunk and '"usage":{' in chunk:
            body = json.loads(chunk.removeprefix("data: "))
            details = body["usage"].get("completion_tokens_details") or {"reasoning_tokens": 0}
            body["usage"]["completion_tokens_details"] = {**details, **summed(states)}
            chunk = f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
        yield chunk


for _name in ALL:
    _predicted.wraps(f"entrypoints.openai.{_name}", "takes predictions, counts them in the usage")(
        _answer
    )
_predicted.wraps(
    "entrypoints.scale_out.render.serving:ServingRender.render_chat_request",
    "puts predictions into what it renders",
)(_answer)
