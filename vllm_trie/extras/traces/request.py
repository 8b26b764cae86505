"""The option ``speculation_trace``, by which a request asks for its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_trie.hooks.frontend.request_options import SpeculationRequestError, is_switch
from vllm_trie.hooks.start import config
from vllm_trie.searches.settings import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TRACE = "speculation_trace"


def checked(
    vllm_config: VllmConfig, value: object, tokenizer: object, is_search: bool
) -> object | None:
    """Return the option as it travels, see :class:`RequestOption`; searches need none."""
    if not is_switch(value):
        raise SpeculationRequestError(
            f"extra_args[{TRACE!r}]={shown(value)} must be true or false (the default)"
        )
    if value and is_search:
        raise SpeculationRequestError(
            f"beam search: {TRACE} is for requests with drafts, and a search has none; leave it out"
        )
    tree_config = config.read(vllm_config)
    if value and (tree_config is None or tree_config.engine_options.trace_path is None):
        raise SpeculationRequestError(
            f"extra_args[{TRACE!r}] asks for a trace, but this engine writes none; leave it out, "
            "or start the engine with trace_path=FOLDER next to its speculative method"
        )
    return None if is_search else value
