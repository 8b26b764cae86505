"""What answers have beside vLLM's fields: what the scheduler sends along, and what is added over
HTTP; counts of drafts in the log of offline engines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.ledger.record import STATS, Result, Symbols, of_beams

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.output_processor import RequestState

logger = init_logger(__name__)

_COUNTS = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
"""Of vLLM's ``RequestSpecDecodeMetrics``."""

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


def take_along(engine: Symbols, key: str, why: str) -> None:
    """Have what the scheduler sends along with a request's outputs taken out of the field it
    travels in, into ``vars`` of the request's state under the same key."""

    @engine.wraps("output_processor:RequestState.make_request_output", why)
    def make_request_output(
        original: Callable[..., Result],
        self: RequestState,
        new_token_ids: object,
        pooling_output: object,
        finish_reason: object,
        stop_reason: object,
        kv_transfer_params: dict[str, Any] | None = None,
        *args: object,
        **kwargs: object,
    ) -> Result:
        if kv_transfer_params is not None and key in kv_transfer_params:
            vars(self)[key] = kv_transfer_params[key]
            others = {name: value for name, value in kv_transfer_params.items() if name != key}
            kv_transfer_params = others or None
        outcome = (new_token_ids, pooling_output, finish_reason, stop_reason)
        return original(self, *outcome, kv_transfer_params, *args, **kwargs)


def _add_beams(response: Any, outputs: Sequence[CompletionOutput]) -> None:
    """Add the field ``beams`` to an answer whose choices are hypotheses of searches.

    An entry for each choice, in their order: what ``CompletionOutput.beam`` has offline, with null
    for infinite numbers, which JSON does not have.
    """
    beams = [output.beam for output in outputs if hasattr(output, "beam")]
    if beams and hasattr(response, "choices"):
        response.beams = json.loads(json.dumps(beams), parse_constant=lambda _: None)


def complete_answers(openai: Symbols, why: str, add: Add) -> None:
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


complete_answers(
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
