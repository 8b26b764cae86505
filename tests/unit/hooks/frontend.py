"""vLLM's front end without an engine: its output processor with the plugin's hooks, requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.installation import Installation
from vllm_trie.hooks.ledger.table import entries_here

_MODULES = ("vllm.v1.engine.output_processor:", "vllm.outputs:")


@contextmanager
def output_hooks(feature: str) -> Iterator[None]:
    """Put a feature's hooks of outputs in place, but for those that the plugin itself has put."""
    installation = Installation()
    for entry in entries_here(feature):
        is_hook = entry.wrapper is not None and entry.target.startswith(_MODULES)
        if is_hook and entry not in ledger.patches_in_place():
            installation.apply(entry)
    yield
    installation.undo()


def engine_request(prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    """Return a request as the output processor takes it in."""
    request = EngineCoreRequest(
        "a", prompt, None, params, None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    request.external_req_id = "A"
    return request
