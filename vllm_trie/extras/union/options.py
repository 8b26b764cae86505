"""Options of the method `trie_union`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from vllm_trie.drafts import registry
from vllm_trie.drafts.drafter import DrafterOptions
from vllm_trie.drafts.ngram_trie.options import NgramTrieOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafts.engine.config import EngineOptions

METHOD = "trie_union"
TEXT, HEADS = "ngram_trie", "medusa_dynamic"
SHORT_NAMES = {"medusa": HEADS, "ngram": TEXT}
_OF_TEXT = ("joint", "max_context_len", "max_depth")
"""Options of Medusa's heads about the text, which n-grams read for them here."""

NeuralMethod = Literal["dflash", "draft_model", "dspark", "eagle", "eagle3", "mtp"]
NEURAL_METHODS: tuple[str, ...] = get_args(NeuralMethod)
"""Methods of vLLM that draft with weights and a KV cache of their own, and that a union takes."""


class NeuralOptions(DrafterOptions):
    """A trained drafter as an entry of a union's `drafters`."""

    method: NeuralMethod = Field(description="vLLM's name of the method.")
    model: str | None = Field(
        default=None,
        description="Folder or name of the checkpoint; 'mtp' takes the model's own if left out.",
    )
    num_speculative_tokens: int = Field(
        default=4,
        ge=1,
        le=16,
        description="Positions that it predicts, each in a pass; 'dflash' and 'dspark' need one.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> NeuralOptions:
        if self.model is None and self.method != "mtp":
            raise ValueError(
                f"{{'method': {self.method!r}}} needs 'model', the folder or name of its checkpoint"
            )
        return self

    def check(self, vllm_config: VllmConfig, options: EngineOptions) -> None:
        """Refuse a complete configuration that it cannot draft in."""
        from vllm_trie.extras.union.checks import check_trained_drafter

        check_trained_drafter(vllm_config, self.method, self.model)

    def configuration(self, vllm_config: VllmConfig) -> VllmConfig:
        """Return the engine's configuration with the positions that it predicts as draft tokens."""
        of_drafter, speculative = copy(vllm_config), copy(vllm_config.speculative_config)
        assert speculative is not None
        speculative.num_speculative_tokens = min(
            self.num_speculative_tokens, vllm_config.num_speculative_tokens
        )
        speculative.num_speculative_tokens_per_batch_size = None
        of_drafter.speculative_config = speculative
        return of_drafter

    def attach(self, speculator: Any, adapter: Any) -> None:
        """Hand vLLM's speculator to the union, whose heads it becomes."""
        from vllm_trie.extras.union.speculator_heads import SpeculatorHeads

        adapter.verifier.guard.drafter.heads = SpeculatorHeads(speculator, adapter)


class TrieUnionOptions(DrafterOptions):
    """Options of `trie_union`."""

    drafters: list[str | NeuralOptions] = Field(
        default=[TEXT, HEADS],
        min_length=1,
        max_length=2,
        description="'ngram_trie' and one source of heads: 'medusa_dynamic', or a trained drafter "
        "of vLLM's as {'method': 'eagle3', 'model': 'PATH'}. 'ngram' and 'medusa' are short names.",
    )
    options: dict[str, dict[str, Any]] = Field(
        default={},
        description="Options of the parts, as {'ngram_trie': {'store_tokens': 0}}.",
    )

    @field_validator("drafters", mode="before")
    @classmethod
    def _check_entries(cls, entries: object) -> object:
        """Refuse entries that cannot be parts, with a better message than that of their type."""
        if not isinstance(entries, list):
            return entries
        for entry in entries:
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
        full = [SHORT_NAMES.get(e, e) if isinstance(e, str) else e for e in entries]
        allowed = {TEXT, HEADS} & {*registry.available_methods()}
        for entry in full:
            if isinstance(entry, str) and entry not in allowed:
                raise ValueError(
                    f"{entry!r} cannot be a part; allowed: {', '.join(sorted(allowed))}, and a "
                    "trained drafter of vLLM's. Other methods draft alone: ask for one as 'method'"
                )
            if full.count(entry) > 1:
                raise ValueError(f"{entry!r} is named twice; name each part once")
        heads = [entry for entry in full if entry != TEXT]
        if len(heads) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, heads))} are sources of heads, and a union takes one "
                "besides 'ngram_trie'; name one of them"
            )
        if heads and TEXT not in full:
            method = heads[0]["method"] if isinstance(heads[0], dict) else heads[0]
            raise ValueError(
                f"{entries!r} lacks 'ngram_trie', which drafts from the text; add it, or ask for "
                f"method {method!r} instead of the union"
            )
        return full

    @model_validator(mode="after")
    def _check_options(self) -> TrieUnionOptions:
        names = [entry for entry in self.drafters if isinstance(entry, str)]
        for name, given in self.options.items():
            if SHORT_NAMES.get(name, name) not in names:
                raise ValueError(
                    f"options has the key {name!r}, which is not one of the drafters; allowed: "
                    f"{', '.join(names) or 'none'}"
                )
            if SHORT_NAMES.get(name) in self.options:
                raise ValueError(
                    f"options has the keys {SHORT_NAMES[name]!r} and {name!r}, which are one part; "
                    "write its options under one of them"
                )
            for key in _OF_TEXT if SHORT_NAMES.get(name, name) == HEADS else ():
                if given.get(key, "context") != "context":
                    raise ValueError(
                        f"options[{name!r}][{key!r}]={given[key]!r} has no effect since 0.6: "
                        "ngram_trie reads the text for the heads; leave it out, or ask for "
                        f"method {HEADS!r} instead of the union"
                    )
        for name in names:
            registry.parse_options(name, self._given(name))
        return self

    @property
    def speculator(self) -> NeuralOptions | None:
        """The trained drafter of vLLM's among the parts, if there is one."""
        return next((e for e in self.drafters if isinstance(e, NeuralOptions)), None)

    @property
    def text(self) -> NgramTrieOptions:
        """Options of the n-grams."""
        return NgramTrieOptions.model_validate(self._given(TEXT))

    @property
    def heads(self) -> BaseModel:
        """Options of Medusa's heads, which leave the text to the n-grams."""
        return registry.parse_options(HEADS, {**self._given(HEADS), "joint": "product"})

    def _given(self, name: str) -> dict[str, Any]:
        """Return the options given for a part."""
        for given, options in self.options.items():
            if SHORT_NAMES.get(given, given) == name:
                return options
        return {}
