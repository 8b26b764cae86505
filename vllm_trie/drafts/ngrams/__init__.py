"""N-grams of texts: the index, and the blend of its contexts."""

from vllm_trie.drafts.ngrams.blend import Blend, Recycled, Source
from vllm_trie.drafts.ngrams.job import Candidates, Job
from vllm_trie.drafts.ngrams.native import MAX_ORDER, NativeBackend, NativeIndex

__all__ = [
    "MAX_ORDER",
    "Blend",
    "Candidates",
    "Job",
    "NativeBackend",
    "NativeIndex",
    "Recycled",
    "Source",
]
