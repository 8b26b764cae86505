"""The plugin's part of vLLM's ``additional_config``, which every process reads.

It has the switches, the options of extras, and a speculative method with its options.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_trie.extras import brought
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "vllm_trie"
"""The plugin's key in vLLM's ``additional_config``."""
BEAM_SEARCH = "beam_search"
"""False turns native beam search off. Tree speculation leaves this key alone."""
BEAM_KEYS = frozenset({BEAM_SEARCH, *(key for _, keys in brought("keys") for key in keys)})
"""Keys that are not options of a speculative method."""


def spelled(key: str) -> str:
    """Return a key as users write it, for messages."""
    return f"additional_config[{CONFIG_KEY!r}][{key!r}]"


def own_part(additional_config: object) -> Mapping[str, Any]:
    """Return the plugin's part, empty if there is none.

    Raises:
        RefusedError: It is no mapping, its key is misspelled, or the switch of beam search is
            neither True nor False or stands outside of it.
    """
    everything = additional_config if isinstance(additional_config, Mapping) else {}
    given = everything.get(CONFIG_KEY, {})
    for key in everything:
        instead = spelled(key) if key == BEAM_SEARCH else None
        if key != CONFIG_KEY and str(key).lower().replace("-", "_") == CONFIG_KEY:
            instead = repr(CONFIG_KEY)
        if instead:
            raise RefusedError(f"additional_config[{key!r}] has no effect; write {instead}")
    if not isinstance(given, Mapping):
        raise RefusedError(
            f"additional_config[{CONFIG_KEY!r}]={given!r} must be a mapping of option names to "
            "values"
        )
    if not isinstance(given.get(BEAM_SEARCH, False), bool):
        value = given[BEAM_SEARCH]
        raise RefusedError(f"{spelled(BEAM_SEARCH)}={value!r} must be True or False")
    return given


@Symbols("config.vllm:VllmConfig.", "vLLM does not hash additional_config").wraps(
    "compute_hash", "options of the plugin do not make vLLM compile the model again"
)
def compute_hash(
    original: Callable[..., str], self: VllmConfig, *args: object, **kwargs: object
) -> str:
    """Leave the plugin's options out of the hash of what vLLM compiles.

    Drafters, trees and traces are outside of the compiled graph. The draft model stays: its weights
    take memory, and vLLM's start-up plan has the same key.
    """
    additional = self.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return original(self, *args, **kwargs)
    hashed = copy.copy(self)
    hashed.additional_config = {k: v for k, v in additional.items() if k != CONFIG_KEY}
    if draft_model := own_part(additional).get("draft_model"):
        hashed.additional_config[CONFIG_KEY] = draft_model
    return original(hashed, *args, **kwargs)
