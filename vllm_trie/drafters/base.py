"""What a drafter is: it fills a token tree for each request of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from vllm_trie.tree import TokenTree


class DrafterOptions(BaseModel):
    """Base of every drafter's options: frozen, strictly typed, unknown names refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may know about the engine it runs in.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: the longest sequence, prompt and output, in tokens.
        max_num_seqs: the largest batch.
        num_nodes: node budget N of one request's tree (`num_speculative_tokens`).
        hidden_size: width of the target model's hidden states.
        dtype, device: of the target model, as PyTorch spells them ("bfloat16", "cpu").
        tensor_parallel_size, rank: every rank builds its own, identical tree.
        model, tokenizer: names or paths of the target model and its tokenizer.
        eos_token_ids: tokens that end a sequence.
        draft_model: name or path of the drafter's own weights, for methods that have some.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_nodes: int
    hidden_size: int
    dtype: str
    device: str
    tensor_parallel_size: int
    rank: int
    model: str
    tokenizer: str | None
    eos_token_ids: tuple[int, ...]
    draft_model: str | None = None


class VerifiedStep(NamedTuple):
    """What the last verification of a request found."""

    tree: TokenTree
    """The tree as scheduled, which may be a prefix of the proposed one."""
    accepted: tuple[int, ...]
    """Accepted node indices, root first."""
    node_argmax: np.ndarray | None
    """int32 [N + 1], the target's argmax after the last committed token and after each node; only
    for drafters with `needs_node_argmax`."""


@dataclass(slots=True)
class DraftRequest:
    """One request of a batch that wants a tree.

    Attributes:
        request_id: the engine's id of the request.
        token_ids: int32 [num_tokens], prompt and output; a view that is valid during the call only.
        num_prompt_tokens: leading tokens of `token_ids` that are the prompt.
        max_nodes: most nodes the tree may have, at least 1.
        max_depth: deepest node the tree may have (the room left to the model's length limit), at
            least 1.
        chain_only: the tree must be a chain (structured outputs).
        hidden_state: torch tensor [hidden_size] of the last accepted position, only for drafters
            with `needs_hidden_states`.
        last_step: the previous verification of this request, None before the first.
        cache_salt: requests may profit from one another's text only if they carry the same salt.
        min_probability: nodes whose path is less likely than this would not be verified; a drafter
            that knows probabilities may leave them out and save its time.
    """

    request_id: str
    token_ids: np.ndarray
    num_prompt_tokens: int
    max_nodes: int
    max_depth: int
    chain_only: bool = False
    hidden_state: Any | None = None
    last_step: VerifiedStep | None = None
    cache_salt: str | None = None
    min_probability: float = 0.0


class Drafter(ABC):
    """Fills token trees; one object serves all requests of an engine's rank."""

    name: ClassVar[str]
    """The method's name in the configuration."""
    Options: ClassVar[type[BaseModel]]
    """The method's options, set beside `method` in the speculative configuration."""
    needs_hidden_states: ClassVar[bool] = False
    needs_node_argmax: ClassVar[bool] = False

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        self.options: Any = options
        self.context = context

    def load_model(self, target_model: Any) -> None:  # noqa: B027 - optional, not abstract
        """Load the drafter's own weights, if it has any, once `target_model` is loaded."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Draft a tree for each request, in the same order; `TokenTree.empty()` for no guess.

        A deterministic function of the tokens seen so far: every tensor-parallel rank calls it with
        the same requests and must get the same trees. May update the drafter's state of each
        request; does not modify the requests. Trees obey `max_nodes`, `max_depth` and `chain_only`
        and are laid out depth-first with the likeliest child first.

        A request whose tokens are not an extension of those of its last call (it was preempted
        and came back shorter or changed) is indexed anew.
        """

    def release(self, request_id: str) -> None:  # noqa: B027 - optional, not abstract
        """Forget a request that has ended; unknown ids are ignored."""
