"""Acceptance rates of candidates, fitted on the shipped model with the hand-written prompts."""

from __future__ import annotations

from collections.abc import Sequence

# Of a candidate's first token by its rank, by the length of the context that it shares with the
# text:
_FIRST = ((0.36, 0.14, 0.06, 0.06, 0.03), (0.65, 0.3, 0.1), (0.65, 0.3, 0.1), (0.89, 0.5, 0.1))
# Where it shares less context than the best candidate, by the length of the best one's:
_LESS_CONTEXT = (0.0, 0.1, 0.03, 0.012)
# Of a next token, by the length of the shared context and the number of right tokens before:
_CONTINUED = ((0.68, 0.68, 0.83), (0.76, 0.82, 0.94), (0.72, 0.85, 0.88), (0.93, 0.94, 0.95))
# Of a next token that differs from a better candidate's; each further one is half as likely:
_BRANCHED = (0.09, 0.2, 0.25, 0.4)


def acceptance_rate(rank: int, num_matched: int, num_right: int, best_matched: int) -> float:
    """Return the probability that a token is right if those before it are.

    Args:
        rank: Number of other tokens that better candidates have there.
        num_matched: Length of the context that the candidate shares with the text.
        num_right: Right tokens before.
        best_matched: Length of the context that the best candidate shares, which tells only of
            first tokens.
    """
    if num_right:
        if not rank:
            return _at(_CONTINUED[num_matched], num_right - 1)
        return _BRANCHED[num_matched] * 0.5 ** (rank - 1)
    if num_matched < best_matched:
        return _LESS_CONTEXT[best_matched]
    return _at(_FIRST[num_matched], rank)


def _at(values: Sequence[float], index: int) -> float:
    return values[min(index, len(values) - 1)]
