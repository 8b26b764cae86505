"""Options of the method `trie_union`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from vllm_trie.drafts import registry
from vllm_trie.drafts.drafter import DrafterOptions
from vllm_trie.extras.union.neural import NEURAL_METHODS, NeuralOptions

METHOD = "trie_union"
SHORT_NAMES = {"medusa": "medusa_dynamic", "ngram": "ngram_trie"}


class TrieUnionOptions(DrafterOptions):
    """Options of `trie_union`."""

    drafters: list[str | NeuralOptions] = Field(
        default=["ngram_trie", "medusa_dynamic"],
        min_length=1,
        max_length=8,
        description="Methods whose candidates are merged; 'medusa' and 'ngram' are short for "
        "medusa_dynamic and ngram_trie. One entry may be a trained drafter of vLLM's, as "
        "{'method': 'eagle3', 'model': 'PATH'}.",
    )
    options: dict[str, dict[str, Any]] = Field(
        default={},
        description="Options of the parts, as {'ngram_trie': {'store_tokens': 0}}.",
    )

    @field_validator("drafters", mode="before")
    @classmethod
    def _check_entries(cls, entries: object) -> object:
        """Refuse a trained drafter's name without its checkpoint, with a better message."""
        for entry in entries if isinstance(entries, list) else ():
            if entry in NEURAL_METHODS:
                raise ValueError(
                    f"{entry!r} is a trained drafter and needs its checkpoint; write "
                    f"{{'method': {entry!r}, 'model': 'PATH'}}"
                )
            method = entry.get("method") if isinstance(entry, dict) else None
            if isinstance(entry, dict) and method not in NEURAL_METHODS:
                raise ValueError(
                    f"{entry!r} names the method {method!r}, and a mapping must name a trained "
                    f"drafter of vLLM's; allowed: {', '.join(NEURAL_METHODS)}. Write other parts "
                    "by their name alone, and their options into 'options'"
                )
        return entries

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, entries: list[str | NeuralOptions]) -> list[str | NeuralOptions]:
        full = [SHORT_NAMES.get(e, e) if isinstance(e, str) else e for e in entries]
        methods = [name for name in registry.available_methods() if name != METHOD]
        for entry in full:
            if isinstance(entry, NeuralOptions):
                continue
            # Next to other parts a window takes the place of candidates that are worth more.
            if entry not in methods or registry.get_drafter_class(entry).has_window:
                allowed = [m for m in methods if not registry.get_drafter_class(m).has_window]
                raise ValueError(f"{entry!r} cannot be a part; allowed: {', '.join(allowed)}")
            if full.count(entry) > 1:
                raise ValueError(f"{entry!r} is named twice; name each part once")
        if sum(isinstance(entry, NeuralOptions) for entry in full) > 1:
            raise ValueError("two parts are trained drafters of vLLM's; name one of them")
        return full

    @model_validator(mode="after")
    def _check_options(self) -> TrieUnionOptions:
        names = [entry for entry in self.drafters if isinstance(entry, str)]
        for name in self.options:
            if SHORT_NAMES.get(name, name) not in names:
                raise ValueError(
                    f"options has the key {name!r}, which is not one of the drafters; allowed: "
                    f"{', '.join(names) or 'none'}"
                )
        for name in names:
            registry.parse_options(name, self.of_part(name))
        return self

    @property
    def neural(self) -> NeuralOptions | None:
        """The trained drafter among the parts, if there is one."""
        return next((e for e in self.drafters if isinstance(e, NeuralOptions)), None)

    def of_part(self, name: str) -> dict[str, Any]:
        """Return the options given for a part."""
        for given, options in self.options.items():
            if SHORT_NAMES.get(given, given) == name:
                return options
        return {}
