"""Checks of requests, and results of searches, as request extensions of a patched vLLM."""

from __future__ import annotations

from typing import Any

from vllm.plugins.request_extension import (  # type: ignore[import-not-found]
    RequestExtension,
    register_request_extension,
)

from vllm_trie.vllm_hooks.frontend import beam_requests as frontend
from vllm_trie.vllm_hooks.frontend import online_beam as online
from vllm_trie.vllm_hooks.frontend.beam_options import SPEC_KEY
from vllm_trie.vllm_hooks.frontend.item_requests import decodes_item
from vllm_trie.vllm_hooks.frontend.request_options import (
    check_request_options,
    check_trace,
    refusing_what_fails,
)
from vllm_trie.vllm_hooks.setup.limits import switched_off


class SpeculationRequests(RequestExtension):
    """Checks the speculation options of requests."""

    def prepare_params(self, vllm_config: Any, params: Any) -> Any:
        with refusing_what_fails():
            check_request_options(params)
            check_trace(params, vllm_config)
        return params


class BeamRequests(RequestExtension):
    """Checks beam requests and attaches the search's result to their outputs."""

    def check_api_request(self, request: Any) -> None:
        if not switched_off():
            online.check_api_request(request)

    def has_distinct_outputs(self, params: Any) -> bool:
        return frontend.has_distinct_outputs(params)

    def prepare_params(self, vllm_config: Any, params: Any) -> Any:
        return frontend.prepare_any(vllm_config, params)

    def check_request(self, vllm_config: Any, request: Any) -> None:
        params = request.sampling_params
        if SPEC_KEY in (getattr(params, "extra_args", None) or {}) or decodes_item(params):
            frontend.check_processed(vllm_config, request)

    def complete_output(self, output: Any, result: dict[str, Any]) -> None:
        if SPEC_KEY in result:
            frontend.complete_output(output, result[SPEC_KEY])


def register_speculation() -> None:
    """Add the checks of speculation options."""
    register_request_extension(SpeculationRequests())


def register_beam() -> None:
    """Add what beam requests need."""
    register_request_extension(BeamRequests())
