"""The option `corpus` of `ngram_trie`: a file that a drafter reads as its archive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from vllm_trie.drafts.archive import ArchiveOptions
from vllm_trie.drafts.drafter import DrafterContext
from vllm_trie.drafts.ngrams.native import NativeArchive
from vllm_trie.extras.corpus.corpus_file import (
    CorpusError,
    check_vocabulary,
    open_corpus,
    read_header,
)
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer
from vllm_trie.files.watched_file import WatchedFile


class CorpusOptions(ArchiveOptions):
    """Options of a corpus."""

    corpus: str | None = Field(
        default=None,
        description="A file of `vllm-trie corpus synthesize` or `corpus build` with the model's "
        "tokenizer, as a further source of drafts. The engine reads a file that is moved to its "
        "place while it serves.",
    )

    def check_archive(self, vocab_size: int) -> None:
        if self.corpus is None:
            return
        try:
            check_vocabulary(Path(self.corpus), read_header(Path(self.corpus)), vocab_size)
        except CorpusError as error:
            raise CorpusError(f"option 'corpus' is an unusable file: {error}") from None

    def open_archive(self, context: DrafterContext) -> Callable[[], NativeArchive | None]:
        """Tensor-parallel ranks must draft alike and would see a new file at different steps, so
        they keep the first one."""
        if self.corpus is None:
            return super().open_archive(context)
        tokenizer = load_tokenizer(
            context.tokenizer or context.model,
            context.tokenizer_revision,
            context.trust_remote_code,
        )
        tokenizer_print = fingerprint(tokenizer.vocabulary)

        def open_file(path: Path) -> NativeArchive:
            return open_corpus(path, context.vocab_size, tokenizer_print)

        path = Path(self.corpus)
        if context.tensor_parallel_size > 1:
            corpus = open_file(path)
            return lambda: corpus
        return WatchedFile(path, open_file, "the corpus").latest
