"""Hooks in the front end: check beam requests, and attach the search's result to outputs."""

from __future__ import annotations

import functools
import zlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from vllm_trie.vllm_hooks.frontend.beam_metrics import record
from vllm_trie.vllm_hooks.frontend.beam_options import (
    SPEC_KEY,
    BeamRequestError,
    asks_for_beam,
    beam_spec,
    check_blocks,
    check_inputs,
    check_processors,
    check_slots,
    prepare_params,
    refuse_own_key,
)
from vllm_trie.vllm_hooks.frontend.extra_args import check_extra_args
from vllm_trie.vllm_hooks.frontend.item_requests import (
    asks_for_item,
    check_decoding,
    check_length,
    check_parameters,
    decodes_item,
    prepare_decoding,
)
from vllm_trie.vllm_hooks.frontend.request_options import refusing_what_fails
from vllm_trie.vllm_hooks.setup.support import beam_slots, reason_off, unsupported_rule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import RequestState

    from vllm_trie.beam import BeamOptions


def has_distinct_outputs(params: SamplingParams) -> bool:
    """Return whether this is a beam request, whose outputs differ at temperature 0, too."""
    # Copies that the engine makes of a checked request carry the key in place of the options.
    return asks_for_beam(params) or SPEC_KEY in (params.extra_args or {})


def prepare_any(vllm_config: VllmConfig, params: Any) -> Any:
    """Check the ``extra_args`` of any request; return what the engine gets, `params` for most.

    Raises:
        BeamRequestError: The engine cannot serve it.
    """
    with refusing_what_fails():
        refuse_own_key(params)
        check_extra_args(vllm_config, params, custom_processors(vllm_config))
        asks = asks_for_beam(params) or asks_for_item(params)
        return prepare_request(vllm_config, params) if asks else params


def prepare_request(vllm_config: VllmConfig, params: SamplingParams) -> SamplingParams:
    """Check a request with `beam_width` or `items`; return a copy that the engine understands.

    Raises:
        BeamRequestError: The engine cannot serve it.
    """
    if not asks_for_beam(params):
        return prepare_decoding(vllm_config, params)
    if reason := reason_off(vllm_config):
        raise BeamRequestError(f"beam_width was given, but native beam search is off: {reason}")
    prepared = prepare_params(params)
    check_processors(prepared, custom_processors(vllm_config))
    options = _options(prepared)
    check_slots(options.beam_width, beam_slots(vllm_config))
    check_parameters(vllm_config, params, options)
    if reason := unsupported_rule(vllm_config, params):
        raise BeamRequestError(f"beam search: {reason}; leave one of them out")
    return prepared


def custom_processors(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the custom logits processors that the engine loads."""
    configured = vllm_config.model_config.logits_processors or []
    names = [each if isinstance(each, str) else each.__qualname__ for each in configured]
    return [*names, *_installed_processors()]


@functools.cache
def _installed_processors() -> tuple[str, ...]:
    return tuple(each.value for each in entry_points(group=LOGITSPROCS_GROUP))


def check_processed(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    """Refuse a processed request, with `beam_width` or `items`, that the engine cannot hold.

    Keeps the members of a request on one engine: may set its ``data_parallel_rank``.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    with refusing_what_fails():
        if decodes_item(request.sampling_params):
            check_decoding(vllm_config, request)
        else:
            _check_search(vllm_config, request)


def _check_search(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    check_inputs(request)
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    options = _options(params)
    check_length(vllm_config, params, options, len(prompt))
    if cache.num_gpu_blocks:  # known here
        # Data-parallel engines report the sum of their blocks.
        blocks = cache.num_gpu_blocks // parallel.data_parallel_size - 1
        room = vllm_config.model_config.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        check_blocks(len(prompt), options.beam_width, max_new, cache.block_size, blocks)
    # One engine must get all members, to make them one group.
    if parallel.data_parallel_size > 1 and params.n > 1 and request.data_parallel_rank is None:
        ranks = (
            parallel.data_parallel_size_local
            if parallel.local_engines_only
            else parallel.data_parallel_size
        )
        request.data_parallel_rank = zlib.crc32(request.request_id.encode()) % ranks


def complete_output(output: Any, result: dict[str, Any]) -> None:
    """Give a hypothesis' ``CompletionOutput`` its ``cumulative_logprob``, ``score`` and ``beam``.

    ``beam`` is a dictionary: ``score``, ``cumulative_logprob``, ``steps`` of the search, ``item``,
    the id of the item that was found, if the search was inside a catalogue, and ``trace``, if asked
    for. The id is also the output's ``item``.
    """
    record(result)
    output.cumulative_logprob = result["cumulative_logprob"]
    output.score = result["score"]
    output.beam = result
    if "item" in result:
        output.item = result["item"]


def wrap_verify_greedy_sampling(original: Any) -> Any:
    """Allow ``n > 1`` at temperature 0 for beam requests."""

    @functools.wraps(original)
    def _verify_greedy_sampling(self: SamplingParams) -> None:
        if not has_distinct_outputs(self):
            original(self)

    return _verify_greedy_sampling


def wrap_process_inputs(original: Any) -> Any:
    """Check beam requests where every request of every front end passes."""

    @functools.wraps(original)
    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        prepared = prepare_any(self.vllm_config, params)
        request = original(self, request_id, prompt, prepared, *args, **kwargs)
        if prepared is not params:
            check_processed(self.vllm_config, request)
        return request

    return process_inputs


def wrap_make_request_output(original: Any) -> Any:
    """Take the search's result out of the field it travels in."""

    @functools.wraps(original)
    def make_request_output(
        self: RequestState,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kv_transfer_params is not None and SPEC_KEY in kv_transfer_params:
            self._beam_result = kv_transfer_params[SPEC_KEY]  # type: ignore[attr-defined]
            kv_transfer_params = None
        outcome = (new_token_ids, pooling_output, finish_reason, stop_reason)
        return original(self, *outcome, kv_transfer_params, *args, **kwargs)

    return make_request_output


def wrap_new_completion_output(original: Any) -> Any:
    """Attach the search's result to a hypothesis."""

    @functools.wraps(original)
    def _new_completion_output(self: RequestState, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        result = self.__dict__.get("_beam_result")
        if result is not None:
            complete_output(output, result)
        return output

    return _new_completion_output


def _options(params: SamplingParams) -> BeamOptions:
    return beam_spec(params).options
