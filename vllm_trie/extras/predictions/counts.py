"""Counts of predictions, from the worker to a request's outputs, and to the usage over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_trie.extras.predictions.source import PREDICTION, PredictionCounts
from vllm_trie.hooks.frontend.answers import complete_answers, remembered, take_along
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
        no_tokens = PredictionCounts(0, 0)._asdict()
        vars(self.request_states[request.request_id]).setdefault(CARRIED, no_tokens)


take_along(_engine, CARRIED, "takes the counts of a prediction out of the field they travel in")


@_engine.wraps(
    "output_processor:RequestState._new_completion_output",
    "gives outputs the counts of their predictions",
)
def new_completion_output(
    original: Callable[..., CompletionOutput], self: RequestState, *args: Any, **kwargs: Any
) -> CompletionOutput:
    output = original(self, *args, **kwargs)
    if (counts := vars(self).get(CARRIED)) is not None:
        assert self.detokenizer is not None
        accepted, rejected = (counts[name] for name in COUNTS)
        # Tokens behind a stop are cut off, and accepted tokens may be among them.
        num_cut = max(accepted - self.detokenizer.num_output_tokens(), 0)
        vars(output).update(PredictionCounts(accepted - num_cut, rejected + num_cut)._asdict())
    return output


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


def counts_of(outputs: Iterable[CompletionOutput]) -> dict[str, int]:
    """Return the counts of a request's predictions, summed over its outputs; empty without any."""
    predicted = [output for output in outputs if hasattr(output, COUNTS[0])]
    return {name: sum(getattr(out, name) for out in predicted) for name in COUNTS if predicted}


def _add_counts(response: Any, outputs: Sequence[CompletionOutput]) -> None:
    """Add the counts of predictions to the usage of an answer."""
    usage = getattr(response, "usage", None)
    if usage is not None and (counts := counts_of(outputs)):
        from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

        details = usage.completion_tokens_details or CompletionTokenUsageInfo()
        usage.completion_tokens_details = CompletionTokenUsageInfo(**dict(details), **counts)


complete_answers(
    Symbols("entrypoints.openai.", _UNTIL), "answers with the counts of predictions", _add_counts
)


async def _stream_with_counts(
    original: Callable[..., AsyncIterator[str]], self: Any, request: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """Add the counts to the usage at the end of a stream."""
    if PREDICTION not in (request.vllm_xargs or {}):
        async for chunk in original(self, request, *args, **kwargs):
            yield chunk
        return
    last: dict[tuple[int, int], CompletionOutput] = {}
    arguments = [remembered(arg, last) if hasattr(arg, "__aiter__") else arg for arg in args]
    async for chunk in original(self, request, *arguments, **kwargs):
        counts = counts_of(last.values())
        if counts and '"choices":[]' in chunk and '"usage":{' in chunk:
            body = json.loads(chunk.removeprefix("data: "))
            details = body["usage"].get("completion_tokens_details") or {"reasoning_tokens": 0}
            body["usage"]["completion_tokens_details"] = {**details, **counts}
            chunk = f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
        yield chunk


for _name in (
    "chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
    "completion.serving:OpenAIServingCompletion.completion_stream_generator",
):
    _predicted.wraps(f"entrypoints.openai.{_name}", "streams end with the counts")(
        _stream_with_counts
    )
