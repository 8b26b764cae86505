"""The two implementations of the blended scoring: compiled, and in readable Python."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.ngram_trie import blended, native
from vllm_trie.drafters.ngram_trie.constants import USE_LENGTH
from vllm_trie.drafters.ngram_trie.index import NgramIndex
from vllm_trie.drafters.ngram_trie.interface import Backend, Draft, Index, Job


class NativeBackend:
    """The compiled core."""

    def new_index(self, max_order: int) -> Index:
        return native.NativeIndex(max_order)

    def draft_batch(self, jobs: Sequence[Job]) -> list[Draft]:
        return [Draft(*result) for result in native.draft_batch(jobs)]


class PythonBackend:
    """The readable twin."""

    def __init__(self, blend: blended.Blend | None = None) -> None:
        self._blend = blend or blended.Blend()

    def new_index(self, max_order: int) -> Index:
        return NgramIndex(max_order)

    def draft_batch(self, jobs: Sequence[Job]) -> list[Draft]:
        return [self._draft(job) for job in jobs]

    def _draft(self, job: Job) -> Draft:
        job.own.synchronize(job.tokens[: job.num_indexed].tolist())
        indexes = [job.own, *(index for index in (job.store, job.corpus) if index is not None)]
        drafted = self._blend.draft(
            indexes,
            job.tokens.tolist(),
            job.max_nodes,
            job.max_depth,
            job.chain_only,
            job.min_probability,
        )
        used_text = -1
        if job.store is not None and drafted.matches[1].length >= USE_LENGTH:
            used_text = drafted.matches[1].text
        return Draft(drafted.tree, used_text)


def choose_backend() -> Backend:
    """The compiled core where it can be compiled, else the Python one (the reason is logged)."""
    return NativeBackend() if native.is_available() else PythonBackend()
