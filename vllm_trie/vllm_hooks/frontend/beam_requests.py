"""Hooks in the front end: check beam requests, and attach the search's result to outputs."""

from __future__ import annotations

import functools
import zlib
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestState

from vllm_trie.vllm_hooks.frontend.beam_options import (
    SPEC_KEY,
    BeamRequestError,
    asks_for_beam,
    check_inputs,
    min_blocks,
    prepare_params,
    refuse_own_key,
)
from vllm_trie.vllm_hooks.setup.support import reason_off


def has_distinct_outputs(params: SamplingParams) -> bool:
    """Whether this is a beam request, whose outputs differ at temperature 0 too."""
    # Copies that the engine makes of a checked request carry the key in place of the options.
    return asks_for_beam(params) or SPEC_KEY in (params.extra_args or {})


def prepare_request(vllm_config: Any, params: SamplingParams) -> SamplingParams:
    """Check a beam request's parameters and return a copy that the engine understands.

    Raises:
        BeamRequestError: The engine cannot serve it.
    """
    if reason := reason_off(vllm_config):
        raise BeamRequestError(f"beam_width was given, but native beam search is off: {reason}")
    prepared = prepare_params(params)
    assert prepared.extra_args is not None
    _check_slots(vllm_config, prepared.extra_args[SPEC_KEY]["options"]["beam_width"])
    return prepared


def check_processed(vllm_config: Any, request: Any) -> None:
    """Refuse a processed beam request that the engine cannot hold.

    Keeps the members of a request on one engine: may set its ``data_parallel_rank``.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    check_inputs(request)
    options = request.sampling_params.extra_args[SPEC_KEY]["options"]
    _check_blocks(vllm_config, request, options["beam_width"])
    _keep_members_together(vllm_config.parallel_config, request)


def complete_output(output: Any, result: dict[str, Any]) -> None:
    """Give a hypothesis' ``CompletionOutput`` its ``cumulative_logprob``, ``score`` and ``beam``.

    ``beam`` is a dictionary: ``score``, ``cumulative_logprob``, ``steps`` of the search and, if
    asked for, ``trace``.
    """
    output.cumulative_logprob = result["cumulative_logprob"]
    output.score = result["score"]
    output.beam = result


def wrap_verify_greedy_sampling(original: Any) -> Any:
    """Allow ``n > 1`` at temperature 0 for beam requests: their outputs differ all the same."""

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
        refuse_own_key(params)
        if not asks_for_beam(params):
            return original(self, request_id, prompt, params, *args, **kwargs)
        params = prepare_request(self.vllm_config, params)
        request = original(self, request_id, prompt, params, *args, **kwargs)
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
        return original(
            self,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            kv_transfer_params,
            *args,
            **kwargs,
        )

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


def _check_slots(vllm_config: Any, beam_width: int) -> None:
    scheduler = vllm_config.scheduler_config
    slots = scheduler.max_num_seqs
    if (active := getattr(scheduler, "max_num_active_seqs", None)) is not None:
        slots = min(slots, active)
    if beam_width > slots:
        raise BeamRequestError(
            f"beam_width must be at most max_num_seqs={slots}, got {beam_width}; lower beam_width "
            "or start the engine with a larger max_num_seqs"
        )


def _check_blocks(vllm_config: Any, request: Any, beam_width: int) -> None:
    cache = vllm_config.cache_config
    if not cache.num_gpu_blocks:  # not known here
        return
    # Data-parallel engines report the sum of their blocks.
    blocks = cache.num_gpu_blocks // vllm_config.parallel_config.data_parallel_size - 1
    num_prompt_tokens = len(request.prompt_token_ids)
    room = vllm_config.model_config.max_model_len - num_prompt_tokens
    max_new = min(request.sampling_params.max_tokens, room)
    needed = min_blocks(num_prompt_tokens, beam_width, max_new, cache.block_size)
    if needed > blocks:
        raise BeamRequestError(
            f"beam_width={beam_width} with a prompt of {num_prompt_tokens} tokens needs at "
            f"least {needed} KV blocks of {cache.block_size} tokens, the engine has {blocks}; "
            "lower beam_width, shorten the prompt or give the engine more KV cache memory"
        )


def _keep_members_together(parallel: Any, request: Any) -> None:
    """Send all members of a request to one of several data-parallel engines: to be one group."""
    if parallel.data_parallel_size == 1 or request.data_parallel_rank is not None:
        return
    if request.sampling_params.n > 1:
        ranks = (
            parallel.data_parallel_size_local
            if parallel.local_engines_only
            else parallel.data_parallel_size
        )
        request.data_parallel_rank = zlib.crc32(request.request_id.encode()) % ranks
