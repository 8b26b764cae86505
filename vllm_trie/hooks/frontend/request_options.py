"""Options of requests: keys of ``extra_args`` that the workers read.

The opt-out is the core's. Extras bring the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from vllm.exceptions import VLLMValidationError

from vllm_trie.extras import brought, load
from vllm_trie.hooks.wire import CACHE_SALT, SPECULATION, extra_args_of, is_search
from vllm_trie.refusal import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.tokenizers import TokenizerLike


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


class RequestOption(Protocol):
    """Checks the value of an option, whatever its size, and packs it."""

    def __call__(
        self,
        vllm_config: VllmConfig,
        value: object,
        tokenizer: TokenizerLike | None,
        is_search: bool,
    ) -> object | None:
        """Return a value as it travels to the workers; None where it has no effect.

        Args:
            vllm_config: Of the engine.
            value: As the user gave it.
            tokenizer: The model's.
            is_search: Whether the request is a search, which has no drafts.

        Raises:
            SpeculationRequestError: Naming the option, its value and what is allowed.
        """


@functools.cache
def brought_options() -> Mapping[str, RequestOption]:
    """Return the options that extras bring, by key."""
    return {
        key: load(package, name)
        for package, options in brought("request_options")
        for key, name in options.items()
    }


@functools.cache
def option_keys() -> frozenset[str]:
    """Return the keys of all options."""
    return frozenset({SPECULATION, *brought_options()})


@functools.cache
def chat_fields() -> frozenset[str]:
    """Return the fields of chats that extras read."""
    return frozenset(name for _, names in brought("chat_fields") for name in names)


def is_switch(value: object) -> bool:
    """Return whether a value is a boolean; JSON's reach vLLM's extra arguments as 0 and 1."""
    return isinstance(value, int | float) and value in (0, 1)


def with_packed_options(
    vllm_config: VllmConfig, params: Any, tokenizer: TokenizerLike | None
) -> Any:
    """Check a request's options; return its parameters with them as they travel.

    Raises:
        SpeculationRequestError: Naming the option, its value and what is allowed.
    """
    extra_args = extra_args_of(params)
    if CACHE_SALT in extra_args:
        raise SpeculationRequestError(
            f"extra_args[{CACHE_SALT!r}] is for vllm-trie's own use; leave it out, and give the "
            "request a cache_salt"
        )
    if not is_switch(value := extra_args.get(SPECULATION, True)):
        raise SpeculationRequestError(
            f"extra_args[{SPECULATION!r}]={shown(value)} must be true (the default) or false; "
            "false decodes the request without drafts"
        )
    packed = {
        key: pack(vllm_config, extra_args[key], tokenizer, is_search(params))
        for key, pack in brought_options().items()
        if key in extra_args
    }
    if packed:
        others = {key: value for key, value in extra_args.items() if key not in packed}
        travelling = {key: value for key, value in packed.items() if value is not None}
        params = params.clone()
        params.extra_args = others | travelling
    return params
