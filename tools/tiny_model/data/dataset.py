"""Token arrays for training and the rows drawn from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tools.tiny_model.data.corpus import Corpus, SourceFile
from tools.tiny_model.data.documents import Document, DocumentMaker, usable_names
from tools.tiny_model.data.excerpts import function_groups
from tools.tiny_model.data.tokenizer import END, END_ID, save_tokenizer, train_tokenizer

PROMPT_WEIGHT = 0.5
"""Loss weight of a task document's prompt, which is code that plain rows have as well."""
_MIN_FILL = 80
"""Rest of a row, in tokens, that is filled with plain code rather than another document."""
_PLAIN_EPOCHS = 3
_TEST_SHARE = 3
"""One in so many test files is read per epoch: they are two thirds of the library's text."""


@dataclass(frozen=True)
class Ragged:
    """Sequences of tokens end to end: sequence i is ``tokens[starts[i]:starts[i + 1]]``.

    ``splits[i]`` is the length of its prompt, 0 where every token is to be learnt.
    """

    tokens: np.ndarray  # uint16
    starts: np.ndarray  # int64, one more than there are sequences
    splits: np.ndarray  # int64

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Ragged:
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        tokens = np.fromiter(
            (token for pair in pairs for part in pair for token in part), np.uint16, sum(lengths)
        )
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return cls(tokens, starts, np.array([len(prompt) for prompt, _ in pairs], np.int64))

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """``(tokens, prompt length)``."""
        return self.tokens[self.starts[index] : self.starts[index + 1]], int(self.splits[index])


@dataclass(frozen=True)
class Dataset:
    """Everything :class:`RowFeed` draws from, and the held-out counterpart."""

    plain: np.ndarray  # uint16: files, each closed by END
    snippets: Ragged  # single functions, each closed by END
    documents: Ragged  # of at most 512 tokens
    long_documents: Ragged  # of at most 1,024 tokens
    longest_documents: Ragged  # of at most 2,048 tokens
    held_plain: np.ndarray
    held_documents: Ragged

    def save(self, path: Path) -> None:
        arrays = {}
        for name, value in vars(self).items():
            if isinstance(value, Ragged):
                arrays |= {f"{name}.{field}": array for field, array in vars(value).items()}
            else:
                arrays[name] = value
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        with np.load(path) as file:
            arrays = dict(file)
        parts = {name: value for name, value in arrays.items() if "." not in name}
        for name in {name.split(".")[0] for name in arrays if "." in name}:
            fields = ("tokens", "starts", "splits")
            parts[name] = Ragged(*(arrays[f"{name}.{field}"] for field in fields))
        return cls(**parts)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], limit: int) -> Ragged:
    """Prompt and answer are encoded apart, as they are when the model is used.

    Documents of more than ``limit`` tokens are left out.
    """
    prompts = _encode(tokenizer, [document.prompt for document in documents])
    answers = _encode(tokenizer, [document.answer for document in documents])
    both = zip(prompts, answers, strict=True)
    return Ragged.of([(p, a) for p, a in both if len(p) + len(a) <= limit])


def encode_files(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> np.ndarray:
    """All files end to end, uint16, each closed by END."""
    encoded = _encode(tokenizer, [file.text for file in files])
    return np.array([token for ids in encoded for token in [*ids, END_ID]], np.uint16)


def _cut_somewhere(source: str, rng: random.Random) -> tuple[str, str]:
    """Split a function where a person's prompt may end, or not at all.

    The halves are tokenized apart, so that the model also sees tokens which do not merge across
    the end of a prompt (a line break before unindented code, half a word).
    """
    if rng.random() < 0.5:
        return source, ""
    lines = source.split("\n")
    line = rng.randrange(1, len(lines)) if len(lines) > 1 else 0
    at = len("\n".join(lines[:line])) + (line > 0)
    how = rng.random()
    if how < 0.4:
        at += len(lines[line]) - len(lines[line].lstrip())
    elif how < 0.6:
        at += rng.randrange(len(lines[line]) + 1)
    elif how < 0.75:
        at -= line > 0
    return source[:at], source[at:]


def _snippets(files: Sequence[SourceFile], rng: random.Random, count: int) -> list[str]:
    sources = [
        source
        for file in files
        if not file.is_test
        for _, group in function_groups(file, max_chars=1400)
        for source in group
    ]
    rng.shuffle(sources)
    return sources[:count]


def build_dataset(
    corpus: Corpus, folder: Path, seed: int = 0, documents: int = 40_000, context: int = 2048
) -> Dataset:
    """Make documents, train the tokenizer into ``folder`` and encode everything.

    Takes one to two minutes with the default count; the result depends on the corpus and the
    seed alone.
    """
    rng = random.Random(seed)
    names = usable_names(corpus.train)

    def make(files: Sequence[SourceFile], count: int, max_chars: int) -> list[Document]:
        maker = DocumentMaker(files, names)
        bar = tqdm(
            range(count), desc=f"documents of {max_chars} characters", leave=False, disable=None
        )
        return [maker.make(rng, max_chars) for _ in bar]

    short = make(corpus.train, documents, 750)
    long = make(corpus.train, documents // 4, 2000)
    longest = make(corpus.train, documents // 16, 4500)
    held = make(corpus.held_out, max(200, documents // 60), 750)
    snippets = _snippets(corpus.train, rng, documents)

    library = [f.text for f in corpus.train if not f.is_test]
    tests = [f.text for f in corpus.train if f.is_test]
    sample = [document.prompt + document.answer for document in short[:5000]]
    tokenizer = train_tokenizer(library + tests[::_TEST_SHARE] + sample)
    save_tokenizer(tokenizer, folder, context)

    halves = [_cut_somewhere(source, rng) for source in snippets]
    heads = _encode(tokenizer, [head for head, _ in halves])
    tails = _encode(tokenizer, [tail + END for _, tail in halves])
    library_tokens, test_tokens = _encode(tokenizer, library), _encode(tokenizer, tests)
    stream: list[np.ndarray] = []
    for epoch in range(_PLAIN_EPOCHS):
        files = library_tokens + test_tokens[epoch % _TEST_SHARE :: _TEST_SHARE]
        rng.shuffle(files)
        stream += [np.array([*tokens, END_ID], np.uint16) for tokens in files]
    return Dataset(
        plain=np.concatenate(stream),
        snippets=Ragged.of([([], head + tail) for head, tail in zip(heads, tails, strict=True)]),
        documents=encode_documents(tokenizer, short, 512),
        long_documents=encode_documents(tokenizer, long, 1024),
        longest_documents=encode_documents(tokenizer, longest, 2048),
        held_plain=encode_files(tokenizer, corpus.held_out),
        held_documents=encode_documents(tokenizer, held, 512),
    )


class RowFeed:
    """Draws training rows; the sequence of rows depends on the seed alone.

    Args:
        dataset: where rows come from.
        document_share, snippet_share: how often a row is filled with task documents or with
            single functions; all other rows are plain code.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int = 0,
        document_share: float = 0.36,
        snippet_share: float = 0.14,
    ) -> None:
        self._data, self._rng = dataset, random.Random(seed)
        self._shares = (document_share, snippet_share)
        self._position = 0
        self._queues: dict[str, list[int]] = {}

    def state(self) -> tuple:
        return self._rng.getstate(), self._position, self._queues

    def set_state(self, state: tuple) -> None:
        rng, self._position, self._queues = state
        self._rng.setstate(rng)

    def _plain(self, count: int) -> np.ndarray:
        if self._position + count > len(self._data.plain):
            self._position = 0
        self._position += count
        return self._data.plain[self._position - count : self._position]

    def _next(self, name: str, room: int) -> tuple[np.ndarray, int] | None:
        """The next sequence of that pool that fits into ``room`` tokens, in shuffled order."""
        pool: Ragged = getattr(self._data, name)
        queue = self._queues.setdefault(name, [])
        if len(queue) < 8:
            fresh = list(range(len(pool)))
            self._rng.shuffle(fresh)
            queue[:0] = fresh
        for back in range(1, 9):
            tokens, split = pool[queue[-back]]
            if len(tokens) <= room:
                del queue[-back]
                return tokens, split
        return None

    def row(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """``(tokens, loss weights)``, both of ``count``."""
        documents, snippets = self._shares
        draw = self._rng.random()
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        room = count
        while draw < documents + snippets and room > _MIN_FILL:
            name = "snippets"
            if draw < documents:
                longer = self._rng.random() < 0.7
                name = "documents"
                if longer and count > 1100:
                    name = "longest_documents"
                elif longer and count > 600:
                    name = "long_documents"
            found = self._next(name, room)
            if found is None:
                break
            tokens, split = found
            weights = np.ones(len(tokens), np.float32)
            weights[:split] = PROMPT_WEIGHT
            parts.append((tokens, weights))
            room -= len(tokens)
        if room:
            filling = (self._plain(room), np.ones(room, np.float32))
            parts.insert(0 if self._rng.random() < 0.5 else len(parts), filling)
        return (
            np.concatenate([tokens for tokens, _ in parts]).astype(np.int64),
            np.concatenate([weights for _, weights in parts]),
        )

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(ids, next ids, weights of the next ids)``, each ``[rows, length]``."""
        drawn = [self.row(length + 1) for _ in range(rows)]
        tokens = np.stack([tokens for tokens, _ in drawn])
        weights = np.stack([weights for _, weights in drawn])
        return tokens[:, :-1].copy(), tokens[:, 1:].copy(), weights[:, 1:].copy()
