"""The speculation options of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from vllm_trie.vllm_hooks.ledger import offered
from vllm_trie.vllm_hooks.setup import config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CACHE_SALT = "vllm_trie_cache_salt"
"""Key of ``SamplingParams.extra_args`` that carries a request's cache salt to the worker."""
SPECULATION = "speculation"
"""Key of ``SamplingParams.extra_args`` that switches a request's drafts off."""
TRACE = "speculation_trace"
"""Key of ``SamplingParams.extra_args`` that asks for a file with the request's trees."""


_samples_as_plain: ContextVar[bool] = ContextVar("samples_as_plain", default=False)
"""Whether the engine of the request that is being checked samples as without speculation."""


class SpeculationRequestError(VLLMValidationError, ValueError):
    """A request with an option that is not allowed; the server answers 400 with its message."""


@contextmanager
def refusing_what_fails() -> Iterator[None]:
    """Refuse a request whose options make a check fail in a way that nobody foresaw.

    Raises:
        SpeculationRequestError: In place of any error that is no refusal.
    """
    try:
        yield
    except VLLMValidationError:
        raise
    except Exception as error:
        raise SpeculationRequestError(
            f"the request's options cannot be read ({type(error).__name__}: {error}); leave them "
            "out one by one to find which"
        ) from error


def check_request_options(params: Any) -> None:
    """Refuse a request with a speculation option that is not allowed.

    Raises:
        SpeculationRequestError: naming the option, its value and what is allowed.
    """
    extra = getattr(params, "extra_args", None) or {}
    if CACHE_SALT in extra:
        raise SpeculationRequestError(
            f"extra_args[{CACHE_SALT!r}] is for vllm-trie's own use; leave it out, and give the "
            "request a cache_salt"
        )
    value = extra.get(SPECULATION, True)
    # JSON's booleans reach vLLM's extra arguments as 0 and 1.
    if not isinstance(value, int | float) or value not in (0, 1):
        raise SpeculationRequestError(
            f"extra_args[{SPECULATION!r}]={value!r} must be true (the default) or false; false "
            "decodes the request without drafts"
        )


def check_trace(params: Any, vllm_config: VllmConfig) -> None:
    """Refuse a request for a trace that the engine does not write.

    Raises:
        SpeculationRequestError: naming the option, its value and what is allowed.
    """
    extra = getattr(params, "extra_args", None) or {}
    if TRACE not in extra:
        return
    value = extra[TRACE]
    if not isinstance(value, int | float) or value not in (0, 1):
        raise SpeculationRequestError(
            f"extra_args[{TRACE!r}]={value!r} must be true or false (the default)"
        )
    tree_config = config.read(vllm_config)
    if value and (tree_config is None or tree_config.engine_options.trace_path is None):
        raise SpeculationRequestError(
            f"extra_args[{TRACE!r}] asks for a trace, but this engine writes none; leave it out, "
            "or start the engine with trace_path=FOLDER next to its speculative method"
        )


def wrap_process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check requests where every request of every front end passes."""

    @functools.wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with refusing_what_fails():
            check_request_options(params)
            check_trace(params, self.vllm_config)
            walks_trees = _walks_trees(self.vllm_config)
        token = _samples_as_plain.set(walks_trees)
        try:
            return original(self, request_id, prompt, params, *args, **kwargs)
        finally:
            _samples_as_plain.reset(token)

    return process_inputs


def wrap_validate_spec_decode(original: Callable[..., None]) -> Callable[..., None]:
    """Allow ``min_p`` and ``logit_bias`` where trees verify drafts.

    vLLM's rejection sampler does not apply them. A walk down a tree calls vLLM's own sampler with
    the whole batch, as without speculation.
    """

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not _samples_as_plain.get():
            original(self, speculative_config)

    return _validate_spec_decode


def _walks_trees(vllm_config: VllmConfig) -> bool:
    return (
        config.read(vllm_config) is not None
        and not vllm_config.use_v2_model_runner
        and not offered("draft_verifier")  # a patched runner has vLLM's list of processors
        and config.verification(vllm_config) == "tree"
    )
