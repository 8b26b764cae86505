"""Tokenizers of texts in files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class TextTokenizer(NamedTuple):
    """The part of a tokenizer that turns files into tokens."""

    encode: Callable[[str], list[int]]
    """Token ids of a text, without BOS and EOS."""
    vocabulary: dict[str, int]
    """Token text to id."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.vocabulary.values()) + 1


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Identify a tokenizer by its vocabulary, token text to id."""
    digest = hashlib.sha256()
    for text, token in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token}:{len(text)}:{text}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def load_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> TextTokenizer:
    """Load a tokenizer: a Hugging Face name or folder, or a SentencePiece file (`*.model*`).

    Args:
        name: The tokenizer.
        revision: Of its repository: a branch, a tag or a commit.
        trust_remote_code: Whether to run code that comes with it.

    Raises:
        ValueError: There is no such tokenizer, or its library is not installed.
    """
    try:
        if ".model" in Path(name).name and Path(name).is_file():
            return _load_sentencepiece(name)
        return _load_hugging_face(name, revision, trust_remote_code)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: {reason}; name a folder or a model on the "
            "Hugging Face hub, or a SentencePiece file (*.model); --trust-remote-code allows a "
            "tokenizer's own code"
        ) from error


def _load_sentencepiece(name: str) -> TextTokenizer:
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=name)
    vocabulary = {pieces.id_to_piece(token): token for token in range(pieces.vocab_size())}
    return TextTokenizer(lambda text: list(pieces.encode(text)), vocabulary)


def _load_hugging_face(name: str, revision: str | None, trust_remote_code: bool) -> TextTokenizer:
    from transformers import AutoTokenizer

    # In engines too, since vLLM's own class for Mistral's files spells tokens in another way.
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code
    )
    return TextTokenizer(
        # verbose would warn of texts longer than the model's context.
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        tokenizer.get_vocab(),
    )
