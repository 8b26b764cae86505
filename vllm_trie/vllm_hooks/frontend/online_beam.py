"""``use_beam_search`` of the OpenAI-compatible server on the native path."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from vllm import RequestOutput
from vllm.logger import init_logger
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

from vllm_trie.vllm_hooks.frontend.beam_options import BeamRequestError
from vllm_trie.vllm_hooks.frontend.offline_beam import NOT_TOKENS, beam_extra_args, refuse_items
from vllm_trie.vllm_hooks.setup.support import reason_for_stock_search

logger = init_logger(__name__)

_FIELDS = (
    "stop",
    "stop_token_ids",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "min_p",
    "top_p",
    "top_k",
    "seed",
    "prompt_logprobs",
    "thinking_token_budget",
    "repetition_detection",
)
"""Fields of an OpenAI request that vLLM's own beam search ignores; the native one honours them, or
refuses the request."""


def check_api_request(request: Any) -> None:
    """Refuse an OpenAI request for a beam search, in either way, that it cannot serve.

    Raises:
        BeamRequestError: It asks for a stream.
    """
    extra_args = getattr(request, "vllm_xargs", None) or {}
    beam = getattr(request, "use_beam_search", False) or "beam_width" in extra_args
    if not beam:
        return
    if getattr(request, "stream", False):
        raise BeamRequestError(
            "stream=true is not supported with beam search: hypotheses are known only at the end; "
            "set stream to false"
        )


def wrap_to_beam_search_params(original: Any) -> Any:
    """Keep the request, for the fields that a ``BeamSearchParams`` lacks."""

    @functools.wraps(original)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        params.openai_request = self
        return params

    return to_beam_search_params


def wrap_to_sampling_params(original: Any) -> Any:
    """Check a beam request that came as ``vllm_xargs``."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_api_request(self)
        return original(self, *args, **kwargs)

    return to_sampling_params


def wrap_beam_search(original: Any) -> Any:
    """Have the serving classes' ``beam_search`` send one native request, not one per token."""

    @functools.wraps(original)
    def beam_search(
        self: Any,
        prompt: Any,
        request_id: str,
        params: BeamSearchParams,
        lora_request: Any = None,
        trace_headers: Any = None,
        session_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        arguments = (prompt, request_id, params, lora_request, trace_headers, session_id)
        # At once, not when the first output is asked for: what is refused gets a 400.
        outputs = native_beam_search(self, *arguments, **options)
        return original(self, *arguments, **options) if outputs is None else outputs

    return beam_search


def native_beam_search(
    serving: Any,
    prompt: Any,
    request_id: str,
    params: BeamSearchParams,
    lora_request: Any,
    trace_headers: Any,
    session_id: str | None,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None] | None:
    """Return the request's outputs; None where only vLLM's own search can serve it.

    Args:
        serving: vLLM's serving class.
        options: Further arguments of later versions of vLLM, for the engine client.

    Raises:
        BeamRequestError: The native search refuses something in the request.
    """
    reason = reason_for_stock_search(serving.engine_client.vllm_config, params)
    if reason is None and prompt["type"] != "token":
        reason = NOT_TOKENS
    if reason is not None:
        refuse_items(_extra_args(params), reason)
        logger.info_once("use_beam_search runs vLLM's own beam search: %s", reason)
        return None
    check_api_request(getattr(params, "openai_request", None))
    outputs: AsyncGenerator[RequestOutput, None] = serving.engine_client.generate(
        prompt,
        to_sampling_params(params),
        request_id,
        lora_request=lora_request,
        trace_headers=trace_headers,
        session_id=session_id,
        **options,
    )
    return outputs


def to_sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return the native request of a server's beam-search request.

    Raises:
        BeamRequestError: A field of the request does not go with beam search.
    """
    request: Any = getattr(params, "openai_request", None)
    values = {
        name: value
        for name in _FIELDS
        if (value := getattr(request, name, None)) is not None and value != []
    }
    if request is not None:
        values["structured_outputs"] = request.extract_structured_outputs()
    logprobs = getattr(request, "logprobs", None)
    if isinstance(logprobs, bool):  # chat has two fields, completions have one number
        logprobs = (getattr(request, "top_logprobs", None) or 0) if logprobs else None
    if logprobs is not None:
        values["logprobs"] = logprobs
    return SamplingParams.from_optional(
        n=params.beam_width,
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=_extra_args(params),
        **values,
    )


def _extra_args(params: BeamSearchParams) -> dict[str, Any]:
    request = getattr(params, "openai_request", None)
    return beam_extra_args(params) | (getattr(request, "vllm_xargs", None) or {})
