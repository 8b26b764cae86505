"""Options of the method `trie_union`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from vllm_trie.drafters import registry
from vllm_trie.drafters.base import DrafterOptions

METHOD = "trie_union"
SHORT_NAMES = {"lookahead": "lookahead_trie", "medusa": "medusa_dynamic", "ngram": "ngram_trie"}


class TrieUnionOptions(DrafterOptions):
    """Options of `trie_union`."""

    drafters: list[str] = Field(
        default=["ngram_trie", "lookahead_trie"],
        min_length=1,
        max_length=8,
        description="Methods whose candidates are merged; 'lookahead', 'medusa' and 'ngram' are "
        "short for lookahead_trie, medusa_dynamic and ngram_trie.",
    )
    options: dict[str, dict[str, Any]] = Field(
        default={},
        description="Options of the parts by name, as {'ngram_trie': {'store_tokens': 0}}.",
    )
    adaptive: bool = Field(
        default=True,
        description="Whether parts that add nothing to the others are suspended, and tried again "
        "from time to time.",
    )

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, names: list[str]) -> list[str]:
        full = [SHORT_NAMES.get(name, name) for name in names]
        allowed = [name for name in registry.available_methods() if name != METHOD]
        for name in full:
            if name not in allowed:
                raise ValueError(f"{name!r} cannot be a part; allowed: {', '.join(allowed)}")
            if full.count(name) > 1:
                raise ValueError(f"{name!r} is named twice; name each part once")
        return full

    @model_validator(mode="after")
    def _check_options(self) -> TrieUnionOptions:
        for name in self.options:
            if SHORT_NAMES.get(name, name) not in self.drafters:
                raise ValueError(
                    f"options has the key {name!r}, which is not one of the drafters; allowed: "
                    f"{', '.join(self.drafters)}"
                )
        for name in self.drafters:
            registry.parse_options(name, self.of_part(name))
        return self

    def of_part(self, name: str) -> dict[str, Any]:
        """Return the options given for a part."""
        for given, options in self.options.items():
            if SHORT_NAMES.get(given, given) == name:
                return options
        return {}
