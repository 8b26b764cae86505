"""The speculation options of a request."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

CACHE_SALT = "vllm_trie_cache_salt"
"""Key of ``SamplingParams.extra_args`` that brings a request's cache salt to the worker."""
SPECULATION = "speculation"
"""Key of ``SamplingParams.extra_args`` that switches a request's drafts off."""


class SpeculationRequestError(VLLMValidationError, ValueError):
    """A request with options that make no sense; the server answers 400 with its message."""


def check_request_options(params: Any) -> None:
    """Refuse a request whose own speculation options make no sense.

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
