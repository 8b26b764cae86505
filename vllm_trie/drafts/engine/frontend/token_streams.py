"""Streams that a parser reads, token by token.

vLLM's parsers of tool calls and of reasoning depend on where a stream's messages end: tags are
found in the text or the tokens of one message. Plain decoding sends a message for each token, and
with accepted drafts an engine sends several tokens at once. A request whose stream is parsed gets
each token as an output of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.frontend.answers import CHAT, RESPONSES, answered_within
from vllm_trie.hooks.ledger.record import Result, Symbols

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    Output = RequestOutput | PoolingRequestOutput

MOST_WAITING = 1024
"""Outputs that wait for a client that does not read; later ones become one, as all do in vLLM."""

_UNTIL = "vLLM's parsers read messages of several tokens as they read single ones"
_streams = Symbols(until=_UNTIL)
_splits: ContextVar[bool] = ContextVar("splits", default=False)
"""Whether the request that is being added gets its tokens one by one."""


async def _token_by_token(
    original: Callable[..., Any], self: Any, request: Any, *args: object, **kwargs: object
) -> Any:
    """Answer a request whose stream is parsed token by token."""
    is_parsed = any(getattr(self, name, None) for name in ("parser_cls", "parser", "use_harmony"))
    if request.stream and is_parsed and config.read(self.engine_client.vllm_config) is not None:
        return await answered_within(_splits, True, original, self, request, *args, **kwargs)
    return await original(self, request, *args, **kwargs)


for _name in (CHAT, RESPONSES):
    _streams.wraps(f"entrypoints.openai.{_name}", "gives parsers single tokens")(_token_by_token)


_collector = Symbols("v1.engine.output_processor:RequestOutputCollector.", _UNTIL)


@_streams.subclasses(
    "v1.engine.async_llm:RequestOutputCollector",
    "keeps the outputs of streams that are parsed apart",
    "output_kind request_id",
)
class TokenCollector(RequestOutputCollector):
    """vLLM's collector of a request's outputs, which merges those that nobody has read yet.

    Attributes:
        splits: Whether outputs have a token each, and stay apart.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self.splits = _splits.get()
        self._waiting: deque[RequestOutput | PoolingRequestOutput] = deque()

    @_collector.overrides("keeps outputs apart")
    def put(self, output: Output | Exception) -> None:
        if not self.splits or self.output is None or isinstance(output, Exception):
            super().put(output)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(output)
        else:
            last: Any = self._waiting[-1]
            last.add(output, aggregate=self.aggregate)

    @_collector.overrides("takes in the next output")
    async def get(self) -> Output:
        output = await super().get()
        self._put_next()
        return output

    @_collector.overrides("takes in the next output")
    def get_nowait(self) -> Output | None:
        output = super().get_nowait()
        self._put_next()
        return output

    def _put_next(self) -> None:
        if self._waiting:
            super().put(self._waiting.popleft())


_OF_ALL = frozenset(("request_id", "kv_transfer_params"))
_OF_FIRST = frozenset(
    ("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "prefill_stats", "routed_experts")
)
"""Fields of an output that all of its tokens have, and those of the first; the last has the rest.
"""


class TokenOutput(EngineCoreOutput):
    """A token of an engine's output.

    Attributes:
        whole: The output, for statistics; None behind its first token.
    """

    whole: EngineCoreOutput | None = None


@_streams.wraps(
    "v1.engine.output_processor:OutputProcessor.process_outputs",
    "splits the outputs of streams that are parsed",
)
def process_outputs(
    original: Callable[..., Result],
    self: OutputProcessor,
    engine_core_outputs: list[EngineCoreOutput],
    *args: object,
    **kwargs: object,
) -> Result:
    return original(self, list(_split(self, engine_core_outputs)), *args, **kwargs)


def _split(
    processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]
) -> Iterator[EngineCoreOutput]:
    for output in outputs:
        state = None
        if len(output.new_token_ids) > 1:
            state = processor.request_states.get(output.request_id)
        if state is not None and getattr(state.queue, "splits", False):
            yield from tokens_of(output)
        else:
            yield output


def tokens_of(output: EngineCoreOutput) -> Iterator[TokenOutput]:
    """Yield an output's tokens as outputs; the first has its beginning, the last its end."""
    tokens, logprobs, mask = output.new_token_ids, output.new_logprobs, output.new_sampling_mask
    fields = {name: getattr(output, name) for name in output.__struct_fields__}
    last = len(tokens) - 1
    for i, token in enumerate(tokens):
        kept = {
            name: value
            for name, value in fields.items()
            if name in _OF_ALL or (i == 0 if name in _OF_FIRST else i == last)
        }
        kept["new_token_ids"] = [token]
        kept["new_logprobs"] = None if logprobs is None else logprobs.slice_request(i, 1)
        kept["new_sampling_mask"] = None if mask is None else mask.slice_request(i, 1)
        yield TokenOutput(**kept, whole=output if i == 0 else None)


@_streams.wraps(
    "v1.engine.output_processor:OutputProcessor._update_stats_from_output",
    "counts an output that was split once",
)
def update_stats_from_output(
    original: Callable[..., None],
    self: OutputProcessor,
    req_state: RequestState,
    engine_core_output: EngineCoreOutput,
    *args: object,
    **kwargs: object,
) -> None:
    if isinstance(engine_core_output, TokenOutput):
        if engine_core_output.whole is None:
            return
        engine_core_output = engine_core_output.whole
    original(self, req_state, engine_core_output, *args, **kwargs)
