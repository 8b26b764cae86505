"""Predicted outputs: the field ``prediction`` of chats, and the extra argument of that name.

The text is tokenized here, once, and travels as the bytes of int32 ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from vllm_trie.drafts.engine import config
from vllm_trie.extras.predictions.source import PREDICTION
from vllm_trie.hooks.frontend.request_options import SpeculationRequestError
from vllm_trie.refusal import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.tokenizers import TokenizerLike

logger = init_logger(f"vllm.{__name__}")

_ALLOWED = (
    '{"type": "content", "content": TEXT}, with a string or a list of {"type": "text", "text": '
    "TEXT}"
)


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


def packed_for_engine(
    vllm_config: VllmConfig, value: object, tokenizer: TokenizerLike | None, is_search: bool
) -> bytes | None:
    """Return a prediction as it travels, see :class:`RequestOption`; searches need none."""
    packed = pack(vllm_config, value, tokenizer)
    return None if packed is None or is_search else bytes(packed)  # messages take no subclass


async def take_prediction(serving: Any, request: Any) -> None:
    """Check and tokenize the prediction of a server's request, where others do not wait for it."""
    fields = request.model_extra or {}
    xargs = getattr(request, "vllm_xargs", None) or {}
    if PREDICTION in xargs or (PREDICTION in fields and "messages" in type(request).model_fields):
        prediction = xargs.get(PREDICTION)
        if (field := fields.pop(PREDICTION, None)) is not None:
            prediction = text_of_field(field)
        others = {key: value for key, value in xargs.items() if key != PREDICTION}
        packed = None
        makes_requests = "vllm_xargs" not in type(request).model_fields  # of each chat
        if makes_requests or not hasattr(serving, "engine_client"):  # which renders requests
            packed = prediction
        elif prediction is not None:
            make_packed = make_async(pack, executor=serving.renderer._executor)
            vllm_config = serving.engine_client.vllm_config
            packed = await make_packed(vllm_config, prediction, serving.renderer.tokenizer)
        request.vllm_xargs = others if packed is None else {**others, PREDICTION: packed}
