"""Options of the method `ngram_trie`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vllm_trie.drafters.base import DrafterOptions


class NgramTrieOptions(DrafterOptions):
    """Options of `ngram_trie`; the defaults of the first four are the paper's."""

    scoring: Literal["frequency"] = Field(
        default="frequency",
        description="How nodes are chosen: 'frequency' is the n-gram-trie paper's method, the "
        "most frequent continuations of the longest matching suffix.",
    )
    ngram_size: int = Field(
        default=13,
        ge=2,
        le=64,
        description="Window n: a guess is at most ngram_size minus the matched length long.",
    )
    max_prefix_len: int = Field(
        default=3,
        ge=1,
        le=16,
        description="L_p: the longest suffix of the text that is looked up; shorter ones are "
        "tried when it does not occur.",
    )
    index_output: bool = Field(
        default=True,
        description="Whether the output is added to the trie as it grows, or the prompt alone "
        "is looked up.",
    )

    @model_validator(mode="after")
    def _check_window(self) -> NgramTrieOptions:
        if self.max_prefix_len >= self.ngram_size:
            raise ValueError(
                f"max_prefix_len={self.max_prefix_len} must be smaller than "
                f"ngram_size={self.ngram_size}: a window holds a matched prefix and at least one "
                "guessed token"
            )
        return self
