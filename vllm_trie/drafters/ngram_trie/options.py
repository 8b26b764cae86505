"""Options of the method `ngram_trie`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vllm_trie.drafters.base import DrafterOptions
from vllm_trie.drafters.request_texts import INDEX_TOKENS
from vllm_trie.ngrams import MAX_ORDER


class NgramTrieOptions(DrafterOptions):
    """Options of `ngram_trie`."""

    scoring: Literal["blended", "frequency"] = Field(
        default="blended",
        description="How nodes are chosen. 'blended': contexts of every length vote, in the "
        "request's own text, finished requests and the corpus. 'frequency': the n-gram-trie "
        "paper's method, the most frequent continuations of the longest matching suffix in the "
        "request's own text.",
    )
    index_output: bool = Field(
        default=True,
        description="Whether the output is added to the trie as it grows, or the prompt alone "
        "is looked up.",
    )
    max_context_len: int = Field(
        default=MAX_ORDER,
        ge=1,
        le=15,
        description="With scoring 'blended': longest context that votes, in tokens.",
    )
    store_tokens: int = Field(
        default=262_144,
        ge=0,
        le=1 << 28,
        description="With scoring 'blended': tokens of finished requests' outputs that are kept "
        "to draft from, the least recently used go first; requests only draw on those with the "
        "same cache_salt. Takes about 200 bytes of memory a token. 0 switches the store off.",
    )
    index_tokens: int = Field(
        default=INDEX_TOKENS,
        ge=0,
        le=1 << 30,
        description="With scoring 'blended': tokens of running requests' texts that are indexed; "
        "text beyond that is not drafted from. Samples of one prompt (n) count it once. Takes "
        "about 200 bytes of memory a token.",
    )
    recycle: bool = Field(
        default=False,
        description="With scoring 'blended', where trees are verified: draft also what the model "
        "named after the nodes of earlier trees, rejected ones included. Takes 10 MiB for all "
        "requests; requests only draw on those with the same cache_salt.",
    )
    corpus: str | None = Field(
        default=None,
        description="With scoring 'blended': a file made by `vllm-trie corpus synthesize` or "
        "`corpus build` with the model's tokenizer, to draft from in addition to the requests' "
        "own text. Another file moved to its place is taken up while the engine serves.",
    )
    ngram_size: int = Field(
        default=13,
        ge=2,
        le=64,
        description="With scoring 'frequency': window n; a guess is at most ngram_size minus the "
        "matched length long.",
    )
    max_prefix_len: int = Field(
        default=3,
        ge=1,
        le=16,
        description="With scoring 'frequency': L_p, the longest suffix of the text that is "
        "looked up; shorter ones are tried when it does not occur.",
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
