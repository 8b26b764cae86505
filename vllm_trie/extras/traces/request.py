"""The option ``speculation_trace``, by which a request asks for its trace, and the check of the
folder for traces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_trie.drafts.engine import config
from vllm_trie.extras.traces.options import trace_path
from vllm_trie.hooks.frontend.request_options import SpeculationRequestError, is_switch
from vllm_trie.refusal import RefusedError, shown

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
    if value and _folder(vllm_config) is None:
        raise SpeculationRequestError(
            f"extra_args[{TRACE!r}] asks for a trace, but this engine writes none; leave it out, "
            "or start the engine with trace_path=FOLDER next to its speculative method"
        )
    return None if is_search else value


def check_folder(vllm_config: VllmConfig) -> None:
    """Refuse a folder that does not exist, or that the engine may not write to.

    Raises:
        RefusedError: Naming the option.
    """
    folder = _folder(vllm_config)
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise RefusedError(
            f"trace_path={folder!r} must be a folder that exists and that the engine may write "
            "to; create it, or leave trace_path out"
        )


def _folder(vllm_config: VllmConfig) -> str | None:
    tree_config = config.read(vllm_config)
    return None if tree_config is None else trace_path(tree_config.engine_options)
