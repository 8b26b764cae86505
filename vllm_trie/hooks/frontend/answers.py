"""What answers have beside vLLM's fields: what the scheduler sends along, and what is added over
HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_trie.hooks.ledger.record import Result, Symbols

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor

_Value = TypeVar("_Value")

CHAT = "chat_completion.serving:OpenAIServingChat.create_chat_completion"
COMPLETION = "completion.serving:OpenAIServingCompletion.create_completion"
RESPONSES = "responses.serving:OpenAIServingResponses.create_responses"
CHATS = "chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion"
ALL = (CHAT, COMPLETION, RESPONSES, CHATS)
"""Methods of ``vllm.entrypoints.openai`` that take a request and return its answer, or a stream;
those of other APIs and of files of requests call them."""


async def answered_within(
    variable: ContextVar[_Value], value: _Value, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return what a coroutine function returns; the engine's requests are added while a variable
    has a value, those of a stream when its first message is waited for."""
    before = variable.set(value)
    try:
        answer = await call(*args, **kwargs)
    finally:
        variable.reset(before)
    return _streamed_within(variable, value, answer) if is_stream(answer) else answer


async def _streamed_within(
    variable: ContextVar[_Value], value: _Value, stream: AsyncGenerator[Result, None]
) -> AsyncGenerator[Result, None]:
    async with aclosing(stream):
        while True:
            before = variable.set(value)
            try:
                message = await anext(stream)
            except StopAsyncIteration:
                return
            finally:
                variable.reset(before)
            yield message


def is_stream(answer: object) -> bool:
    """Return whether an answer is a stream of messages."""
    return isinstance(answer, AsyncGenerator)


def take_along(engine: Symbols, key: str, why: str) -> None:
    """Have what the scheduler sends along with a request's outputs taken out of the field it
    travels in, into ``vars`` of the request's state under the same key."""

    @engine.wraps("output_processor:OutputProcessor.process_outputs", why)
    def process_outputs(
        original: Callable[..., Result],
        self: OutputProcessor,
        engine_core_outputs: list[EngineCoreOutput],
        *args: object,
        **kwargs: object,
    ) -> Result:
        for output in engine_core_outputs:
            sent = output.kv_transfer_params
            if sent is not None and key in sent:
                if (state := self.request_states.get(output.request_id)) is not None:
                    vars(state)[key] = sent[key]
                others = {name: value for name, value in sent.items() if name != key}
                output.kv_transfer_params = others or None
        return original(self, engine_core_outputs, *args, **kwargs)
