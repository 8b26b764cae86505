"""``LLM.beam_search`` and the server's ``use_beam_search`` on the native path.

Each search is one request, searched by the scheduler. vLLM's own search serves what only it can.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm import RequestOutput
from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput, BeamSearchSequence
from vllm.logger import init_logger
from vllm.logprobs import Logprob
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.refusal import shown
from vllm_trie.searches import MAX_LENGTH_PENALTY, BeamOptions
from vllm_trie.searches.engine.beam_support import (
    BeamRequestError,
    beam_slots,
    unsupported_rule,
)
from vllm_trie.searches.engine.constraint import constraints, option_names
from vllm_trie.searches.engine.frontend.hypotheses import PROMPT_TAIL, served
from vllm_trie.searches.engine.frontend.requests import check_api_request

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.tokenizers import TokenizerLike

logger = init_logger(f"vllm.{__name__}")

EXTRA_OPTIONS = ("early_stopping", "do_sample", "num_beam_groups", "diversity_penalty")
"""Attributes of a ``BeamSearchParams`` that the native search reads, next to vLLM's fields and the
options of constraints."""

SEARCHED = ("token", "multimodal")
"""Kinds of vLLM's inputs that the native search takes."""
NOT_SEARCHED = "prompt embeddings are not searched natively"


def beam_extra_args(params: BeamSearchParams) -> dict[str, Any]:
    """Return the ``extra_args`` that ask the engine for this search."""
    extra_args = {"beam_width": params.beam_width, "length_penalty": params.length_penalty}
    names = (*EXTRA_OPTIONS, *sorted(option_names().keys() - BeamOptions.model_fields.keys()))
    given = {name: getattr(params, name) for name in names if hasattr(params, name)}
    return {**extra_args, **given}


def _refuse_constraints(extra_args: Mapping[str, Any], reason: str) -> None:
    """Refuse a constrained search, which vLLM's own search would leave without its constraint.

    Raises:
        BeamRequestError: The search is constrained.
    """
    for name in constraints():
        if extra_args.get(name) is not None:
            raise BeamRequestError(
                f"{name}={shown(extra_args[name])} needs the native beam search, which cannot "
                f"serve this request: {reason}"
            )


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


_count = itertools.count()
"""Numbers searches: vLLM passes one id for all prompts of a request, and may leave it as it is."""

_route = of_beams("entrypoints.generate.beam_search.")


@_route.wraps("offline:BeamSearchOfflineMixin.beam_search", "LLM.beam_search on the native path")
def search_offline(
    original: Callable[..., list[BeamSearchOutput]],
    self: LLM,
    prompts: Sequence[Any],
    params: BeamSearchParams,
    lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
    use_tqdm: bool = False,
    concurrency_limit: int | None = None,
    **options: Any,
) -> list[BeamSearchOutput]:
    """Serve ``LLM.beam_search``, whose `options` are those that it has in the installed vLLM.

    Raises:
        ValueError: ``concurrency_limit`` is below 1.
        RuntimeError: A search failed in the engine.
    """
    engine_inputs: list[Any] = []
    reason = _reason_for_stock_search(self.llm_engine.vllm_config, params)
    if reason is None:
        engine_inputs = list(self._preprocess_cmpl(prompts))
        if any(engine_input["type"] not in SEARCHED for engine_input in engine_inputs):
            reason = NOT_SEARCHED
    if reason is not None:
        _refuse_constraints(beam_extra_args(params), reason)
        logger.info_once("LLM.beam_search runs vLLM's own beam search: %s", reason)
        arguments = (prompts, params, lora_request, use_tqdm, concurrency_limit)
        return original(self, *arguments, **options)

    lora_requests = self._lora_request_to_seq(lora_request, len(engine_inputs))
    # An argument since vLLM 0.33; others are refused.
    priority = {"priority": None} | options
    priorities = self._priority_to_seq(num_requests=len(engine_inputs), **priority)
    if concurrency_limit is None:
        concurrency_limit = max(len(engine_inputs), 1)
    elif concurrency_limit < 1:
        raise ValueError(f"concurrency_limit must be at least 1, got {concurrency_limit}")
    sampling_params = _sampling_params(params)
    results: list[RequestOutput] = []
    for start in range(0, len(engine_inputs), concurrency_limit):
        chunk = slice(start, start + concurrency_limit)
        inputs = engine_inputs[chunk]
        results += self._render_and_run_requests(
            prompts=iter(inputs),  # vLLM warns of lists
            params=self._params_to_seq(sampling_params, len(inputs)),
            output_type=RequestOutput,
            lora_requests=lora_requests[chunk],
            priorities=priorities[chunk],
            use_tqdm=use_tqdm,
        )
    tokenizer = self.renderer.get_tokenizer()
    return [
        _to_beam_output(result, engine_input, lora, tokenizer, params)
        for result, engine_input, lora in zip(results, engine_inputs, lora_requests, strict=True)
    ]


@_route.wraps(
    "online:BeamSearchOnlineMixin.beam_search", "use_beam_search of the server on the native path"
)
def search_online(
    original: Callable[..., AsyncGenerator[RequestOutput, None]],
    self: Any,
    prompt: Any,
    request_id: str,
    params: BeamSearchParams,
    lora_request: LoRARequest | None = None,
    trace_headers: Mapping[str, str] | None = None,
    session_id: str | None = None,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """Have the serving classes' ``beam_search`` send one native request, not one per token.

    Raises:
        BeamRequestError: The native search refuses something in the request.
    """
    # At once, not when the first output is asked for: what is refused gets a 400.
    vllm_config = self.engine_client.vllm_config
    reason = reason_off(vllm_config) or unsupported_rule(vllm_config, params)
    if reason is None and prompt["type"] not in SEARCHED:
        reason = NOT_SEARCHED
    if reason is not None:
        _refuse_constraints(_extra_args(params), reason)
        logger.info_once("use_beam_search runs vLLM's own beam search: %s", reason)
        arguments = (prompt, request_id, params, lora_request, trace_headers, session_id)
        return original(self, *arguments, **options)
    check_api_request(_served_request())
    outputs: AsyncGenerator[RequestOutput, None] = self.engine_client.generate(
        prompt,
        _server_params(params),
        f"{request_id}-{next(_count)}",
        lora_request=lora_request,
        trace_headers=trace_headers,
        session_id=session_id,
        **options,
    )
    return outputs


def _reason_for_stock_search(vllm_config: VllmConfig, params: BeamSearchParams) -> str | None:
    """Return why only vLLM's own search can serve a call, also for what a server refuses."""
    if reason := reason_off(vllm_config) or unsupported_rule(vllm_config, params):
        return reason
    if params.beam_width > (slots := beam_slots(vllm_config)):
        return f"beam_width={params.beam_width} is above max_num_seqs={slots}"
    if abs(params.length_penalty) > MAX_LENGTH_PENALTY:
        limit = f"{MAX_LENGTH_PENALTY:.0f}"
        return f"length_penalty={params.length_penalty} is not between -{limit} and {limit}"
    if params.max_tokens < 1:
        return f"max_tokens={params.max_tokens} is below 1"
    return None


def _sampling_params(params: BeamSearchParams) -> SamplingParams:
    return SamplingParams(
        n=params.beam_width,
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=params.structured_outputs,
        allowed_token_ids=getattr(params, "allowed_token_ids", None),  # since vLLM 0.33
        extra_args=beam_extra_args(params),
    )


def _server_params(params: BeamSearchParams) -> SamplingParams:
    """Return the native request of a server's beam-search request.

    Raises:
        BeamRequestError: A field of the request does not go with beam search.
    """
    request = _served_request()
    values = {
        name: value
        for name in _FIELDS
        if (value := getattr(request, name, None)) is not None and value != []
    }
    if request is not None:
        values["structured_outputs"] = request.extract_structured_outputs()
    # Those of speech set it on the parameters, whose request is not served.
    logprobs = getattr(params if request is None else request, "logprobs", None)
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


def _served_request() -> Any:
    """Return the server's request, for the fields that a ``BeamSearchParams`` lacks."""
    call = served.get()
    return None if call is None else call.request


def _extra_args(params: BeamSearchParams) -> dict[str, Any]:
    return beam_extra_args(params) | (getattr(_served_request(), "vllm_xargs", None) or {})


def _to_beam_output(
    result: RequestOutput,
    engine_input: Any,
    lora_request: LoRARequest | None,
    tokenizer: TokenizerLike,
    params: BeamSearchParams,
) -> BeamSearchOutput:
    decode = functools.partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
    prompt = engine_input["prompt_token_ids"]
    # Decoders look back a few tokens, and a long prompt takes longer than its search.
    beginning, end = decode(prompt), prompt[-PROMPT_TAIL:]
    if (end_text := decode(end)) and beginning.endswith(end_text):
        beginning = beginning.removesuffix(end_text)
    else:
        beginning, end = "", prompt
    sequences = []
    for output in result.outputs:
        if output.finish_reason == "error":
            raise RuntimeError(
                f"beam search failed for request {result.request_id}; the engine's log says why"
            )
        # As in vLLM's own search, tokens and text begin with the prompt.
        tokens = [*prompt, *output.token_ids]
        sequence = BeamSearchSequence(
            orig_prompt=engine_input,
            tokens=tokens,
            logprobs=cast(list[dict[int, Logprob]], list(output.logprobs or [])),
            lora_request=lora_request,
            cum_logprob=output.cumulative_logprob or 0.0,
            text=beginning + decode([*end, *output.token_ids]),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        of_output = vars(output)  # with what its hypothesis has of its own
        names = of_output["beam"].keys() & of_output.keys()
        vars(sequence).update({name: of_output[name] for name in names})
        sequences.append(sequence)
    return BeamSearchOutput(sequences=sequences)
