"""Options of the method `ngram_trie`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from vllm_trie.drafts.archive import ArchiveOptions
from vllm_trie.drafts.ngrams import MAX_ORDER
from vllm_trie.drafts.request_texts import INDEX_TOKENS
from vllm_trie.extras import loaded

if TYPE_CHECKING:
    _OfArchive = ArchiveOptions
else:
    _OfArchive = next(loaded("archive_options"), ArchiveOptions)


class NgramTrieOptions(_OfArchive):
    """Options of `ngram_trie`."""

    index_output: bool = Field(
        default=True,
        description="Draft from the output as it grows, not from the prompt alone.",
    )
    max_context_len: int = Field(
        default=MAX_ORDER,
        ge=1,
        le=15,
        description="Longest context of a prediction, in tokens.",
    )
    store_tokens: int = Field(
        default=262_144,
        ge=0,
        le=1 << 28,
        description="Tokens of finished requests' outputs to draft from, and 12 for each output, "
        "about 200 bytes each; the least recently used go first, and requests share them within a "
        "cache_salt. 0: no store.",
    )
    index_tokens: int = Field(
        default=INDEX_TOKENS,
        ge=0,
        le=1 << 30,
        description="Tokens of running requests' texts that are indexed, about 200 bytes each; "
        "text beyond that is not drafted from. Samples of one prompt (n) count it once.",
    )
    recycle: bool = Field(
        default=True,
        description="Also draft the tokens that the model ranked first at every point that it "
        "computed, rejected nodes included. Requests share them within a cache_salt.",
    )
    recycle_contexts: int = Field(
        default=262_144,
        ge=1024,
        le=1 << 26,
        description="Size of the `recycle` table, in contexts of one to three tokens (80 bytes "
        "each). Cache salts share it equally.",
    )
