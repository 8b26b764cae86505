"""Environment variables of the plugin, as vLLM knows them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from vllm_trie.extras import brought
from vllm_trie.hooks.ledger import TRIAL_SWITCH
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.start.limits import ENV_SWITCH

OWN_VARIABLES = (ENV_SWITCH, TRIAL_SWITCH, "VLLM_TRIE_CACHE_DIR")
"""The documented ones."""


@Symbols("envs:", "plugins can register environment variables").replaces(
    "environment_variables", "vLLM knows the plugin's environment variables"
)
def environment_variables(original: Mapping[str, object]) -> dict[str, Any]:
    """Add those of the plugin's variables that are set, which vLLM would call unknown.

    Not the others: vLLM's compilation caches depend on the whole table.
    """
    variables: dict[str, Any] = {
        name: functools.partial(os.environ.get, name) for name in OWN_VARIABLES
    }
    for _, secrets in brought("secrets"):
        variables |= dict.fromkeys(secrets, lambda: None)  # vLLM writes the values to files
    return {**original, **{name: get for name, get in variables.items() if name in os.environ}}
