"""What is added to answers: scores of hypotheses and counts of predictions over HTTP, counts of
drafts offline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_trie.hooks.ledger.record import STATS, Symbols, of_beams
from vllm_trie.hooks.start import config

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

logger = init_logger(__name__)

_COUNTS = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
"""Of vLLM's ``RequestSpecDecodeMetrics``."""

COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")
"""Fields of the usage, and attributes of a ``CompletionOutput``."""

Add = Callable[[Any, Sequence["CompletionOutput"]], None]
"""Adds what outputs have to an answer."""


async def remembered(
    results: AsyncIterator[Any], last: dict[tuple[int, int], CompletionOutput]
) -> AsyncIterator[Any]:
    """Pass results on, and keep the last output of each choice, by prompt and index."""
    async for result in results:  # of completions with the index of their prompt
        prompt, output = result if isinstance(result, tuple) else (0, result)
        last.update({(prompt, out.index): out for out in output.outputs})
        yield result


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


def _add_beams(response: Any, outputs: Sequence[CompletionOutput]) -> None:
    """Add the field ``beams`` to an answer whose choices are hypotheses of searches.

    An entry for each choice, in their order: what ``CompletionOutput.beam`` has offline, with null
    for infinite numbers, which JSON does not have.
    """
    beams = [output.beam for output in outputs if hasattr(output, "beam")]
    if beams and hasattr(response, "choices"):
        response.beams = json.loads(json.dumps(beams), parse_constant=lambda _: None)


def _complete_answers(openai: Symbols, why: str, add: Add) -> None:
    """Have something added to answers of ``/v1/completions`` and ``/v1/chat/completions``."""

    @openai.wraps(
        "completion.serving:OpenAIServingCompletion.request_output_to_completion_response", why
    )
    def completion_response(
        original: Callable[..., Any],
        self: object,
        final_res_batch: Sequence[RequestOutput],
        *args: object,
        **kwargs: object,
    ) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        add(response, [output for result in final_res_batch for output in result.outputs])
        return response

    @openai.wraps("chat_completion.serving:OpenAIServingChat.chat_completion_full_generator", why)
    async def chat_response(
        original: Callable[..., Any],
        self: object,
        request: object,
        result_generator: AsyncIterator[RequestOutput],
        *args: object,
        **kwargs: object,
    ) -> Any:
        last: dict[tuple[int, int], CompletionOutput] = {}
        results = remembered(result_generator, last)
        response = await original(self, request, results, *args, **kwargs)
        add(response, list(last.values()))
        return response


# Of a feature each: either may step aside alone.
_complete_answers(
    Symbols("entrypoints.openai.", "vLLM takes predicted outputs"),
    "answers with the counts of predictions",
    _add_counts,
)
_complete_answers(
    of_beams("entrypoints.openai."), "answers with the scores of hypotheses", _add_beams
)


@Symbols("entrypoints.common.offline:OfflineInferenceMixin.", STATS).wraps(
    "_run_engine", "logs how many draft tokens were accepted"
)
def run_engine(
    original: Callable[..., list[Any]], self: Any, output_type: Any, use_tqdm: Any = True
) -> list[Any]:
    results = original(self, output_type, use_tqdm=use_tqdm)
    tree_config = config.read(self.llm_engine.vllm_config)
    if tree_config is not None and use_tqdm:
        _log_counts(tree_config.method, results)
    return results


def _log_counts(method: str, results: Iterable[object]) -> None:
    outputs = [out for result in results for out in getattr(result, "outputs", ())]
    metrics = (getattr(out, "spec_decode_metrics", None) for out in outputs)
    counts = Counter[str]()
    for of_output in filter(None, metrics):
        figures = of_output.to_dict()
        counts.update({name: figures[name] for name in _COUNTS})
    if not counts:
        return
    logger.info(
        "vllm-trie %s: %d of %d drafted tokens accepted, in %d drafts; %d output tokens",
        method,
        *(counts[name] for name in _COUNTS),
        sum(len(out.token_ids) for out in outputs),
    )
