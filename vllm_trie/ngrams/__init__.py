"""N-grams of texts: the index, the blend of its contexts, and corpora in files."""

from vllm_trie.ngrams.backend import Backend, NativeBackend, PythonBackend
from vllm_trie.ngrams.blend import Blend, Source
from vllm_trie.ngrams.index import MAX_ORDER, NgramIndex
from vllm_trie.ngrams.job import Candidates, Index, Job, Rows

__all__ = [
    "MAX_ORDER",
    "Backend",
    "Blend",
    "Candidates",
    "Index",
    "Job",
    "NativeBackend",
    "NgramIndex",
    "PythonBackend",
    "Rows",
    "Source",
]
