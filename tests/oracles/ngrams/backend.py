"""Drafting from n-grams in readable Python: the oracle of the compiled core, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracles.ngrams.best_first import BestFirstTree
from tests.oracles.ngrams.index import NgramIndex
from tests.oracles.ngrams.mixture import Answer, Heads, Kind, Mixture, grow
from vllm_trie.drafts.ngrams.blend import Blend
from vllm_trie.drafts.ngrams.job import Candidates, Draft, Job

USE_LENGTH = 3
"""A match of this many tokens counts as a use of the stored text in which it was found."""


class PythonBackend:
    """The readable twin."""

    def __init__(self, blend: Blend, sampled: Blend | None = None) -> None:
        self._blends = blend, sampled or blend

    def new_index(self, max_order: int) -> NgramIndex:
        return NgramIndex(max_order)

    def draft_batch(self, jobs: Sequence[Job], candidates: Candidates | None = None) -> list[Draft]:
        if candidates is None:
            return [self._draft(job, Heads()) for job in jobs]
        fields = (field.tolist() for field in candidates if field is not None)
        rows = zip(jobs, *fields, strict=True)
        return [self._draft(job, Heads(*of_job)) for job, *of_job in rows]

    def _draft(self, job: Job, heads: Heads) -> Draft:
        blend = self._blends[job.is_sampled]
        table = None if job.recycled is None else job.recycled.observe(job)
        sources = ((Kind.OWN, job.own), (Kind.STORE, job.store), (Kind.ARCHIVE, job.archive))
        kinds = [kind for kind, index in sources if index is not None]
        indexes = [index for _, index in sources if index is not None]
        mixture = Mixture(indexes, kinds, blend, table)
        tokens = job.tokens.tolist()
        if job.own is not None and job.num_indexed > 0:
            job.own.synchronize(job.text, job.first, tokens[: job.num_indexed])
        odds = 1.0 if job.recycled is None else blend.recycled.odds
        limits = job.max_nodes, job.max_depth, job.chain_only, job.min_probability
        tree = BestFirstTree(*limits, odds)
        answer = None if job.store is None else Answer(job.answer, job.output_begin)
        contexts = grow(tree, mixture, tokens, heads, answer)
        used_text = -1
        if job.store is not None and len(contexts[1]) > USE_LENGTH:
            used_text = contexts[1][-1].text
        return Draft(tree.lay_out(), used_text)
