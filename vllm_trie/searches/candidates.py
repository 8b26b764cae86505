"""Rules that change the log-probabilities of single candidates before the search.

Hugging Face applies these rules to ``log_softmax(logits)`` over the whole vocabulary. A search over
the best ``k`` raw candidates of a row gives the same result as long as every rule only lowers
log-probabilities and ``k`` is enlarged by the number of tokens that a rule can touch:
:meth:`CandidateRules.num_raw` says by how much. A bias may raise them, so whoever chooses the ``k``
counts it in (:class:`~vllm_trie.searches.blocks.TokenRules`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.searches.settings import SearchSettings

NEVER = np.float32(-np.inf)
"""Log-probability of a forbidden token."""


class Candidates(NamedTuple):
    """Continuations of the rows of a search, by row, best first within a row.

    Attributes:
        rows: int [c], ascending.
        token_ids: int [c], distinct within a row.
        logprobs: float32 [c], log-probabilities of the tokens, before rules; -inf for a token that
            cannot follow.
        keys: float32 [c], largest for the first draw, if they were drawn from all continuations.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    keys: np.ndarray | None = None

    @classmethod
    def of_rows(cls, token_ids: np.ndarray, logprobs: np.ndarray) -> Candidates:
        """Return the candidates of arrays [rows, k], each row's best first."""
        rows = np.repeat(np.arange(len(token_ids)), token_ids.shape[1])
        return cls(rows, token_ids.ravel(), logprobs.ravel())


class Draws(NamedTuple):
    """The rule by which a step of a search draws its candidates.

    Attributes:
        temperature: Divides the log-probabilities.
        seed: Of the step, below 2**63.
    """

    temperature: float
    seed: int


class Outcomes(NamedTuple):
    """The nodes that constrained candidates lead to.

    Attributes:
        ends: bool [c], whether the hypothesis is complete.
        continues: bool [c], whether it can be extended; a complete one may be, too.
    """

    ends: np.ndarray
    continues: np.ndarray


def _penalizes_output(settings: SearchSettings) -> bool:
    return bool(settings.presence_penalty or settings.frequency_penalty)


def _min_kept(settings: SearchSettings) -> int:
    # A filter must leave a candidate that goes on, in addition to those that stop.
    return max(2, 1 + len(settings.stop_token_ids))


class CandidateRules:
    """The rules of one request; they keep no state between rows."""

    def __init__(self, settings: SearchSettings, prompt_token_ids: Sequence[int]) -> None:
        self._settings = settings
        penalized = prompt_token_ids if settings.repetition_penalty != 1.0 else ()
        self._prompt_tokens = np.unique(np.asarray(penalized, dtype=np.int64))
        self._bad_words: dict[tuple[int, ...], list[int]] = {}  # last tokens by those before them
        for word in settings.bad_words:
            self._bad_words.setdefault(word[:-1], []).append(word[-1])
        self._bad_lengths = sorted({len(beginning) for beginning in self._bad_words})
        self.changes = bool(
            settings.repetition_penalty != 1.0
            or _penalizes_output(settings)
            or settings.min_tokens
            or settings.bad_words
            or settings.no_repeat_ngram_size
        )
        """Whether a rule depends on the hypothesis."""
        self.active = self.changes or settings.do_sample
        """False if :meth:`apply` would change nothing."""
        compared = prompt_token_ids if settings.no_repeat_ngram_size else ()
        self._prompt = np.asarray(compared, dtype=np.int64)
        biases = sorted(settings.logit_bias)
        self._biased = np.array([token for token, _ in biases], dtype=np.int64)
        self._bias = np.array([bias for _, bias in biases], dtype=np.float32)

    def num_raw(self, generated: np.ndarray, vocab_size: int) -> int:
        """Return how many raw candidates per row make a step exact, at most `vocab_size`.

        Args:
            generated: int64 [rows, tokens], those of the hypotheses so far.
            vocab_size: Of the model.
        """
        settings, (_, length) = self._settings, generated.shape
        if settings.do_sample:
            if settings.top_k <= 0:
                return vocab_size
            count = max(settings.top_k, _min_kept(settings))
        else:
            count = settings.num_candidates
        if settings.repetition_penalty != 1.0 or _penalizes_output(settings):
            count += self._prompt_tokens.size + length
        if settings.no_repeat_ngram_size:
            count += max(len(np.unique(self._repeating(tokens))) for tokens in generated)
        if length < settings.min_tokens:
            count += len(settings.stop_token_ids)
        if settings.num_beam_groups > 1 and settings.diversity_penalty:
            count += settings.beam_width
        return min(count + len(settings.bad_words), vocab_size)

    def add_bias(self, token_ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Return float32 [...], log-probabilities of candidates with their bias."""
        if not self._biased.size:
            return logprobs
        place = np.minimum(np.searchsorted(self._biased, token_ids), self._biased.size - 1)
        biases = np.where(self._biased[place] == token_ids, self._bias[place], np.float32(0))
        result: np.ndarray = logprobs + biases
        return result

    def apply(
        self, token_ids: np.ndarray, logprobs: np.ndarray, generated: Sequence[int]
    ) -> np.ndarray:
        """Return the log-probabilities of one row after the rules.

        Args:
            token_ids: int [k], distinct candidate tokens.
            logprobs: float32 [k], their log-probabilities with the bias.
            generated: Tokens of the row's hypothesis so far.

        Returns:
            float32 [k], a new array; ``-inf`` for forbidden tokens.
        """
        settings = self._settings
        result = logprobs.astype(np.float32, copy=True)
        if settings.repetition_penalty != 1.0:
            seen = np.isin(token_ids, generated)
            if self._prompt_tokens.size:
                places = np.searchsorted(self._prompt_tokens, token_ids)
                places = np.minimum(places, self._prompt_tokens.size - 1)
                seen |= self._prompt_tokens[places] == token_ids
            penalty = np.float32(settings.repetition_penalty)
            # Only a bias makes a log-probability positive.
            result[seen] *= np.where(result[seen] > 0, 1 / penalty, penalty)
        if _penalizes_output(settings) and generated:
            counts = Counter(generated)
            occurrences = np.array([counts[int(token)] for token in token_ids], dtype=np.float32)
            result -= np.float32(settings.frequency_penalty) * occurrences
            result -= np.float32(settings.presence_penalty) * (occurrences > 0)
        if len(generated) < settings.min_tokens:
            result[np.isin(token_ids, settings.stop_token_ids)] = NEVER
        if banned := self._banned(generated):
            result[np.isin(token_ids, banned)] = NEVER
        if settings.no_repeat_ngram_size:
            result[np.isin(token_ids, self._repeating(generated))] = NEVER
        if settings.do_sample:
            result = self._filter(result)
        return result

    def _banned(self, generated: Sequence[int]) -> list[int]:
        ends = (tuple(generated[max(0, len(generated) - n) :]) for n in self._bad_lengths)
        return [token for end in ends for token in self._bad_words.get(end, ())]

    def _repeating(self, generated: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n], the tokens that would complete a sequence of prompt or hypothesis
        again; one of them for each time.

        As ``NoRepeatNGramLogitsProcessor`` of ``transformers``, which counts the prompt in.
        """
        text = np.concatenate([self._prompt, np.asarray(generated, dtype=np.int64)])
        num_before = self._settings.no_repeat_ngram_size - 1
        following = text[num_before:]
        same = np.ones(len(following), dtype=bool)
        for back in range(1, num_before + 1):
            if not same.any():
                break
            before = num_before - back
            same &= text[before : before + len(following)] == text[-back]
        repeating: np.ndarray = following[same]
        return repeating

    def _filter(self, logprobs: np.ndarray) -> np.ndarray:
        """Apply temperature, then top-k, then top-p, in Hugging Face's order."""
        settings = self._settings
        result = logprobs / np.float32(settings.temperature)
        order = np.argsort(-result, kind="stable")
        kept = _min_kept(settings)
        if 0 < settings.top_k < result.size:
            result[order[max(settings.top_k, kept) :]] = NEVER
        if settings.top_p < 1.0:
            ranked = result[order].astype(np.float64)
            probabilities = np.exp(ranked - ranked[0])
            probabilities /= probabilities.sum()
            mass_before = np.cumsum(probabilities) - probabilities
            cut = mass_before >= settings.top_p
            cut[:kept] = False
            result[order[cut]] = NEVER
        return result
