"""Predicted outputs: the field ``prediction`` of chats, and the extra argument of that name.

The text is tokenized here, once, and travels as the bytes of int32 ids. The counts of accepted and
rejected tokens come back with a request's outputs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from vllm_trie.hooks.frontend.answers import COUNTS, counts_of, remembered
from vllm_trie.hooks.frontend.extra_args import SpeculationRequestError
from vllm_trie.hooks.ledger.record import Result, Symbols
from vllm_trie.hooks.start import config
from vllm_trie.hooks.wire import PREDICTION, extra_args_of, is_search
from vllm_trie.searches.settings import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

logger = init_logger(__name__)

_ALLOWED = (
    '{"type": "content", "content": TEXT}, with a string or a list of {"type": "text", "text": '
    "TEXT}"
)
_predicted = Symbols(until="vLLM takes predicted outputs")

# -- requests --------------------------------------------------------------------------------------


class _Packed(bytes):
    """A prediction that was checked and tokenized; the bytes of a request may be anything."""


def text_of_field(prediction: object) -> str:
    """Return the text of OpenAI's field ``prediction``.

    Raises:
        SpeculationRequestError: The field is not as OpenAI documents it.
    """
    content: Any = None
    if isinstance(prediction, Mapping) and prediction.get("type") == "content":
        content = prediction.get("content")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise SpeculationRequestError(
            f"prediction={shown(prediction)} must be {_ALLOWED}; correct it, or leave it out",
            parameter=PREDICTION,
        )
    return content


def pack(
    vllm_config: VllmConfig, prediction: object, tokenizer: TokenizerLike | None
) -> _Packed | None:
    """Return a prediction's token ids as they travel; None where it has no effect.

    Args:
        vllm_config: Of the engine.
        prediction: A text, token ids, or the result of an earlier call.
        tokenizer: The model's.

    Raises:
        SpeculationRequestError: Naming the field, what is allowed and what to do.
    """
    if isinstance(prediction, _Packed):
        return prediction
    model = vllm_config.model_config
    limit = model.max_model_len
    size = None
    if isinstance(prediction, str):
        if tokenizer is None:
            raise _refusal("a text", "token ids where the engine has no tokenizer")
        size = len(prediction)
        if size <= limit * tokenizer.max_chars_per_token:  # longer ones are not worth the time
            try:
                prediction.encode()
            except UnicodeEncodeError:
                raise _refusal(shown(prediction), "text without lone surrogates") from None
            prediction = tokenizer.encode(prediction, add_special_tokens=False)
    if isinstance(prediction, list):
        size = len(prediction)
        if size <= limit and not all(
            isinstance(token, int) and 0 <= token < model.get_vocab_size() for token in prediction
        ):
            raise _refusal(shown(prediction), f"ids in [0, {model.get_vocab_size()})")
    if size is None:
        raise _refusal(shown(prediction), "a text or a list of token ids")
    if isinstance(prediction, str) or size > limit:
        unit = "characters" if isinstance(prediction, str) else "tokens"
        raise _refusal(f"{size} {unit}", f"at most max_model_len={limit} tokens")
    if config.read(vllm_config) is None:
        logger.info_once(
            "vllm-trie: predictions have no effect, as this engine has no speculative method of "
            "the plugin; start it with one, as --spec-method ngram_trie"
        )
        return None
    return _Packed(np.array(prediction, dtype=np.int32).tobytes())


def _refusal(given: str, allowed: str) -> SpeculationRequestError:
    return SpeculationRequestError(
        f"prediction: got {given}, allowed is {allowed}; correct it, or leave it out",
        parameter=PREDICTION,
    )


def with_packed(vllm_config: VllmConfig, params: Any, tokenizer: TokenizerLike | None) -> Any:
    """Return a request's parameters with its prediction as it travels; searches need none."""
    extra_args = extra_args_of(params)
    if PREDICTION not in extra_args:
        return params
    packed = pack(vllm_config, extra_args[PREDICTION], tokenizer)
    params = params.clone()
    params.extra_args = {key: value for key, value in extra_args.items() if key != PREDICTION}
    if packed is not None and not is_search(params):
        params.extra_args[PREDICTION] = bytes(packed)  # vLLM's messages take no subclass
    return params


async def _take_prediction(
    original: Callable[..., Any], self: Any, request: Any, *args: object, **kwargs: object
) -> Any:
    """Check and tokenize a server's prediction, where the other requests do not wait for it."""
    fields = request.model_extra or {}
    xargs = request.vllm_xargs or {}
    if PREDICTION in xargs or (PREDICTION in fields and "messages" in type(request).model_fields):
        prediction = xargs.get(PREDICTION)
        if (field := fields.pop(PREDICTION, None)) is not None:
            prediction = text_of_field(field)
        others = {key: value for key, value in xargs.items() if key != PREDICTION}
        packed = None
        if prediction is not None:
            make_packed = make_async(pack, executor=self.renderer._executor)
            vllm_config = self.engine_client.vllm_config
            packed = await make_packed(vllm_config, prediction, self.renderer.tokenizer)
        request.vllm_xargs = others if packed is None else {**others, PREDICTION: packed}
    return await original(self, request, *args, **kwargs)


for _name in (
    "chat_completion.serving:OpenAIServingChat.render_chat_request",
    "completion.serving:OpenAIServingCompletion.render_completion_request",
    "responses.serving:OpenAIServingResponses._render_resolved_response_inputs",
):
    _predicted.wraps(f"entrypoints.openai.{_name}", "takes predictions")(_take_prediction)

# -- answers ---------------------------------------------------------------------------------------


@_predicted.wraps(
    "v1.engine.output_processor:OutputProcessor.add_request",
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
        vars(self.request_states[request.request_id]).setdefault("prediction_counts", (0, 0))


@_predicted.wraps(
    "v1.engine.output_processor:RequestState.make_request_output",
    "takes the counts of a prediction out of the field they travel in",
)
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
    if kv_transfer_params is not None and PREDICTION in kv_transfer_params:
        others = {key: value for key, value in kv_transfer_params.items() if key != PREDICTION}
        self.prediction_counts = kv_transfer_params[PREDICTION]  # type: ignore[attr-defined]
        kv_transfer_params = others or None
    outcome = (new_token_ids, pooling_output, finish_reason, stop_reason)
    return original(self, *outcome, kv_transfer_params, *args, **kwargs)


@_predicted.wraps(
    "v1.engine.output_processor:RequestState._new_completion_output",
    "gives outputs the counts of their predictions",
)
def new_completion_output(
    original: Callable[..., CompletionOutput], self: RequestState, *args: Any, **kwargs: Any
) -> CompletionOutput:
    output = original(self, *args, **kwargs)
    if (counts := getattr(self, "prediction_counts", None)) is not None:
        assert self.detokenizer is not None
        accepted, rejected = counts
        # Tokens behind a stop are cut off, and accepted tokens may be among them.
        num_cut = max(accepted - self.detokenizer.num_output_tokens(), 0)
        vars(output).update(zip(COUNTS, (accepted - num_cut, rejected + num_cut), strict=True))
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
