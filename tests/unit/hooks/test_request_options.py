"""Options that requests bring along: what is refused, and as whose fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError

from vllm_trie.vllm_hooks.eligibility import check_request_options


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
