"""The plugin's part of vLLM's ``additional_config``: its key, two switches, and catalogues.

It also carries a speculative method with its options, see
:mod:`vllm_trie.vllm_hooks.setup.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

CONFIG_KEY = "vllm_trie"
"""The plugin's key in vLLM's ``additional_config``."""
BEAM_SEARCH = "beam_search"
"""False turns native beam search off. Tree speculation leaves this key alone."""
ITEMS = "items"
"""Catalogues for constrained beam search, name to path. Tree speculation leaves this key alone."""
BEAM_KEYS = frozenset({BEAM_SEARCH, ITEMS})
"""Keys that are not options of a speculative method."""
ALLOW_GPU = "allow_untested_gpu"
"""True switches tree speculation and native beam search on where they have never run."""
SWITCHES = (BEAM_SEARCH, ALLOW_GPU)

VERIFICATION = "verification"
"""How drafts are verified; start-up replaces "auto" by what it chose."""
Verification = Literal["auto", "tree", "chain"]


def spelled(key: str) -> str:
    """Return a key as users write it, for messages."""
    return f"additional_config[{CONFIG_KEY!r}][{key!r}]"


def own_part(additional_config: Any) -> Mapping[str, Any]:
    """Return the plugin's part, empty if there is none.

    Raises:
        ValueError: it is no mapping, its key is misspelled, a switch in it is neither True nor
            False or stands outside of it, or catalogues are not paths by name.
    """
    everything = additional_config if isinstance(additional_config, Mapping) else {}
    given = everything.get(CONFIG_KEY, {})
    for key in everything:
        if key != CONFIG_KEY and str(key).lower().replace("-", "_") == CONFIG_KEY:
            raise ValueError(f"additional_config[{key!r}] is read by nobody; write {CONFIG_KEY!r}")
        if key in SWITCHES:
            raise ValueError(f"additional_config[{key!r}] is read by nobody; write {spelled(key)}")
    if not isinstance(given, Mapping):
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}]={given!r} must be a mapping of option names to "
            "values"
        )
    for key in SWITCHES:
        if not isinstance(given.get(key, False), bool):
            raise ValueError(f"{spelled(key)}={given[key]!r} must be True or False")
    items = given.get(ITEMS, {})
    if not isinstance(items, Mapping) or any(
        not isinstance(text, str) or not text for pair in items.items() for text in pair
    ):
        raise ValueError(
            f"{spelled(ITEMS)}={items!r} must map names to paths, as in {{'catalogue': 'PATH'}}"
        )
    return given


def switch(vllm_config: Any, key: str) -> bool | None:
    """Return one of the two switches of a complete configuration, None if it is not set."""
    value = own_part(vllm_config.additional_config).get(key)
    return value if isinstance(value, bool) else None
