"""Options of the method `ngram_trie`."""

from __future__ import annotations

from pydantic import Field

from vllm_trie.drafters.base import DrafterOptions
from vllm_trie.drafters.request_texts import INDEX_TOKENS
from vllm_trie.ngrams import MAX_ORDER


class NgramTrieOptions(DrafterOptions):
    """Options of `ngram_trie`."""

    index_output: bool = Field(
        default=True,
        description="Whether the output is added to the trie as it grows, or the prompt alone "
        "is looked up.",
    )
    max_context_len: int = Field(
        default=MAX_ORDER,
        ge=1,
        le=15,
        description="Longest context that votes, in tokens.",
    )
    store_tokens: int = Field(
        default=262_144,
        ge=0,
        le=1 << 28,
        description="Tokens of finished requests' outputs that are kept "
        "to draft from, the least recently used go first; requests only draw on those with the "
        "same cache_salt. Takes about 200 bytes of memory a token. 0 switches the store off.",
    )
    index_tokens: int = Field(
        default=INDEX_TOKENS,
        ge=0,
        le=1 << 30,
        description="Tokens of running requests' texts that are indexed; "
        "text beyond that is not drafted from. Samples of one prompt (n) count it once. Takes "
        "about 200 bytes of memory a token.",
    )
    recycle: bool = Field(
        default=True,
        description="Where trees are verified: draft also what the model "
        "named after the nodes of earlier trees, rejected ones included. Takes 10 MiB for all "
        "requests; requests only draw on those with the same cache_salt.",
    )
    corpus: str | None = Field(
        default=None,
        description="A file made by `vllm-trie corpus synthesize` or "
        "`corpus build` with the model's tokenizer, to draft from in addition to the requests' "
        "own text. Another file moved to its place is taken up while the engine serves.",
    )
