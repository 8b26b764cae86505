"""Options that requests bring along: what is refused, and as whose fault."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError

from vllm_trie.vllm_hooks.frontend.beam_options import SPEC_KEY, refuse_own_key
from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT, check_request_options


@pytest.mark.parametrize("value", ["nonsense", 5, [1, 2], None, 0.5])
def test_nonsense_is_the_clients_error(value: Any) -> None:
    """The server answers 400 to a ``VLLMClientError`` and 500 to any other exception."""
    with pytest.raises(VLLMClientError, match=r"extra_args\['speculation'\]") as error:
        check_request_options(SimpleNamespace(extra_args={"speculation": value}))
    assert isinstance(error.value, ValueError)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("extra_args", [None, {}, {"speculation": True}, {"speculation": 0}])
def test_what_makes_sense_passes(extra_args: dict[str, Any] | None) -> None:
    check_request_options(SimpleNamespace(extra_args=extra_args))


@pytest.mark.parametrize("value", ["tenant", 5, [1, 2]])
@pytest.mark.parametrize(
    ("key", "check", "instead"),
    [(CACHE_SALT, check_request_options, "cache_salt"), (SPEC_KEY, refuse_own_key, "beam_width")],
)
def test_what_the_plugin_tells_itself_is_not_for_requests(
    key: str, check: Callable[[Any], None], instead: str, value: Any
) -> None:
    """It is believed without checks where it arrives: in the worker, and in the scheduler."""
    params = SimpleNamespace(extra_args={key: value})
    with pytest.raises(VLLMClientError, match=key) as error:
        check(params)
    assert f" {instead}" in str(error.value).replace("'", "")
    check(SimpleNamespace(extra_args={"something": value}))
    check(SimpleNamespace(extra_args=None))
