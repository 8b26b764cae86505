"""What passes between the scheduler and the workers about the beams of groups.

The workers keep no state of beams: their tokens and block tables come with every step. Plain
searches under asynchronous scheduling are the exception: the device chooses the children, and the
next step begins before the scheduler hears of them.

A search without rules of its own needs the best continuations of all its beams together, which are
hundreds of times fewer than the best of each beam. vLLM's sampler would give the same number of
log-probabilities to all requests of the batch. The workers therefore select candidates next to the
sampler, with the beams' cumulative log-probabilities or from a catalogue, and send them with the
step's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_trie.extras.items.selection import Selection
from vllm_trie.extras.items.step import Continuations, Normalize
from vllm_trie.searches import Candidates, Draws
from vllm_trie.searches.blocks import TokenRules

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

StepCandidates = Candidates | Continuations
"""Candidates of a group: tokens, or nodes of its catalogue."""

BEAM_STEPS = "vllm_trie_beams"
"""Attribute of a ``SchedulerOutput``: a list of :class:`BeamStep`. Missing if there are none."""

CANDIDATES = "vllm_trie_candidates"
"""Attribute of a ``ModelRunnerOutput``: :data:`StepCandidates` of each selection, None for one that
failed."""

SELECTIONS = "vllm_trie_selections"
"""Attribute of a ``SchedulerOutput``: a list of :class:`TokenSelection` and
:class:`ItemSelection`. Missing if there is none in an engine without catalogues."""


class TokenSelection(NamedTuple):
    """Candidates of a group without a catalogue.

    Attributes:
        proxy_id: The request that stands for the group.
        totals: float32 [beams], their cumulative log-probabilities. None to select among the
            continuations of each beam, not of all beams together.
        num_candidates: Continuations to select.
        rules: They come before the selection; None if there are none.
        draws: How to draw, None to take the best.
        stop_token_ids: The device chooses the children, none of which ends with these tokens, so
            that it can begin the next step. None if the scheduler chooses. Without `totals` the
            step is one that the device has begun.
    """

    proxy_id: str
    totals: np.ndarray | None
    num_candidates: int
    rules: TokenRules | None = None
    draws: Draws | None = None
    stop_token_ids: tuple[int, ...] | None = None


class BeamStep(NamedTuple):
    """One token of each beam of a group, in a step.

    Attributes:
        proxy_id: The request that stands for the group.
        prompt_len: Tokens that all beams share.
        num_computed: Tokens of each beam whose KV is computed: the position of its token.
        token_ids: int32 [beams]; None for the children that the device has chosen.
        shared: By KV cache group int32 [blocks], the full blocks of the prompt.
        suffix: By KV cache group int32 [beams, blocks], those behind them; of children that the
            device has chosen their fresh tail blocks, [beams, 0] or [beams, 1].
        lora_request: Of the group.
    """

    proxy_id: str
    prompt_len: int
    num_computed: int
    token_ids: np.ndarray | None
    shared: tuple[np.ndarray, ...]
    suffix: tuple[np.ndarray, ...]
    lora_request: LoRARequest | None

    @property
    def num_beams(self) -> int:
        """The number of beams."""
        return len(self.suffix[0])


class ItemSelection(NamedTuple):
    """Candidates of a group inside a catalogue.

    Attributes:
        path: The catalogue's file.
        memory: Where the scheduler has its content.
        version: Its digest.
        beam_width: Width of the search.
        eos_token_id: Token that must follow an item, None if nothing follows it.
        normalize: What the probabilities are normalized over.
        proxy_id: The request that stands for the group.
        selection: The valid part of the catalogue, None for all of it.
        weight_factor: Factor of the items' weights.
        nodes: int32 [beams], their places in the trie.
        totals: float32 [beams], their cumulative log-probabilities.
    """

    path: str
    memory: str
    version: str
    beam_width: int
    eos_token_id: int | None
    normalize: Normalize
    proxy_id: str
    selection: Selection | None
    weight_factor: float
    nodes: np.ndarray
    totals: np.ndarray
