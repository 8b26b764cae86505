"""Blocks of neighbouring tokens with their largest log-probabilities, for the choice of the best.

Log-probabilities of all rows never exist together: those of a few rows at a time stay in a core's
cache, and those of chosen blocks are computed again from their logits. The operations are those of
``log_softmax``, in its order: ``(logit - largest logit) - log(sum)``, so that the results are equal
bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.attention.device_copy import to_device

BLOCK = 128
"""Tokens of a block."""
_CHUNK = 1 << 18
"""Log-probabilities that a core computes at a time: 1 MiB, about its second-level cache."""
_DEVICE_CHUNK = 1 << 25
"""The same on a device, where each part costs launches."""


class TokenRules(NamedTuple):
    """The work before the choice, for every token of the vocabulary.

    As in Hugging Face's ``generate``, the log-probabilities are those of all tokens, and the rules
    change them without a new normalization.

    Attributes:
        biased: int64 [n], distinct tokens.
        bias: float32 [n], what is added to their log-probabilities.
        allowed: int32 [rows, words] or int32 [1, words] for all rows alike: token ``t`` may follow
            if bit ``t % 32`` of word ``t // 32`` is set. None if every token may.
    """

    biased: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None

    def apply(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocabulary], a new tensor; ``-inf`` for what may not follow."""
        result = logprobs.clone()
        result[:, to_device(self.biased, result.device)] += to_device(self.bias, result.device)
        if self.allowed is not None:
            bits = _unpacked(self.allowed.view(np.uint8), result.device)
            num_bits = bits.shape[1]
            result[:, :num_bits].masked_fill_(bits[:, : result.shape[1]] == 0, -torch.inf)
            result[:, num_bits:] = -torch.inf
        return result


def _unpacked(octets: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return uint8 [rows, 8 * octets], the bits on a device: an eighth of them travels there."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little"))
    return bits_of(to_device(octets, device))


def bits_of(octets: torch.Tensor) -> torch.Tensor:
    """Return uint8 [rows, 8 * octets], the lowest bit of each octet first; slow on a CPU."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (octets[:, :, None] >> shifts & 1).flatten(1)


class Blocks(NamedTuple):
    """Rows of continuations in blocks of neighbouring tokens.

    Attributes:
        values: float [rows, vocabulary]: logits, or log-probabilities after rules.
        size: Tokens of a block; the last one of a row may be shorter.
        maxima: float32 [rows, blocks], the largest log-probabilities.
        largest: float32 [rows], the largest logits; None where `values` are log-probabilities.
        highest: float32 [rows], the largest log-probabilities. A row's others are
            ``(logits - largest) + highest``.
    """

    values: torch.Tensor
    size: int
    maxima: torch.Tensor
    largest: torch.Tensor | None = None
    highest: torch.Tensor | None = None

    def at(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, size], log-probabilities of some blocks; -inf behind the last token.

        Args:
            rows: int64 [n].
            places: int64 [n], of the blocks in their rows.
        """
        full, rest = divmod(self.values.shape[1], self.size)
        end = full * self.size
        in_full = self.values[:, :end].view(-1, full, self.size)
        result: torch.Tensor = in_full[rows, places.clamp(max=full - 1)].float()
        if rest:
            last = self.values[rows, end:].float()
            last = torch.nn.functional.pad(last, (0, self.size - rest), value=-torch.inf)
            result = torch.where((places == full)[:, None], last, result)
        if self.largest is None or self.highest is None:
            return result
        return result.sub_(self.largest[rows, None]).add_(self.highest[rows, None])


def rows_at_once(logits: torch.Tensor) -> int:
    """Return how many rows to copy as float32 at a time, at least one.

    On a CPU the copy stays in the cores' caches, on a device it takes little memory.
    """
    size = _CHUNK * torch.get_num_threads() if logits.is_cpu else _DEVICE_CHUNK
    return max(1, size // logits.shape[-1])


def blocks_of(logits: torch.Tensor, rules: TokenRules | None) -> tuple[Blocks, torch.Tensor | None]:
    """Return the blocks of all continuations, and their log-probabilities if rules change them.

    Args:
        logits: float [rows, vocabulary].
    """
    rows, vocab_size = logits.shape
    size = min(BLOCK, vocab_size)
    maxima = logits.new_empty((rows, -(-vocab_size // size)), dtype=torch.float32)
    if rules is not None:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        ranked = rules.apply(logprobs)
        _write_maxima(ranked, size, maxima)
        return Blocks(ranked, size, maxima), logprobs
    num_at_once = min(rows, rows_at_once(logits))
    largest = logits.new_empty(rows, dtype=torch.float32)
    buffer = logits.new_empty((num_at_once, vocab_size), dtype=torch.float32)
    for first in range(0, rows, num_at_once):
        part = slice(first, first + num_at_once)
        values = logits[part].float()
        logprobs = buffer[: len(values)]
        torch.amax(values, -1, out=largest[part])
        torch.log_softmax(values, -1, out=logprobs)
        _write_maxima(logprobs, size, maxima[part])
    return Blocks(logits, size, maxima, largest, maxima.amax(-1)), None


def _write_maxima(values: torch.Tensor, size: int, maxima: torch.Tensor) -> None:
    """Write the largest values of each block into `maxima`, float32 [rows, blocks]."""
    full = values.shape[1] // size
    in_full = values[:, : full * size].view(-1, full, size)
    torch.amax(in_full, -1, out=maxima[:, :full])
    if full < maxima.shape[1]:
        torch.amax(values[:, full * size :], -1, out=maxima[:, full])
