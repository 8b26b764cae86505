"""What answers have beside vLLM's fields: what the scheduler sends along, and what is added over
HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_trie.hooks.ledger.record import Result, Symbols

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.output_processor import RequestState

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
