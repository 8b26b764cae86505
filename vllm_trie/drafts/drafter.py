"""The drafter interface: a drafter fills a token tree for each request of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from vllm_trie.drafts.text_store import TextStore
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor, nn


class DrafterOptions(BaseModel):
    """Base of every drafter's options: frozen and strictly typed, without unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The engine that a drafter runs in; the defaults are for a drafter without one.

    Attributes:
        vocab_size: Token ids are in [0, vocab_size).
        max_model_len: The longest sequence, prompt and output, in tokens.
        max_num_seqs: The largest batch.
        num_nodes: Node limit N of one request's tree (`num_speculative_tokens`).
        hidden_size: Width of the target model's hidden states.
        dtype, device: Of the target model, as PyTorch spells them ("bfloat16", "cpu").
        tensor_parallel_size, rank: Every rank drafts, and all verify rank 0's trees.
        model, tokenizer: Names or paths of the target model and its tokenizer.
        draft_model: Name or path of the drafter's own weights, for methods that have weights.
        revision, tokenizer_revision, draft_revision: Branches, tags or commits of these three, if
            they are repositories.
        trust_remote_code: Whether code that comes with model and tokenizer may run.
        download_dir: Where vLLM downloads the model's weights to; None for the hub's cache.
        text_stores: Take the outputs of ended requests and bring those of other engines, see
            :meth:`Drafter.keeps_texts`.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_nodes: int
    hidden_size: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    rank: int = 0
    model: str = ""
    tokenizer: str | None = None
    draft_model: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    download_dir: str | None = None
    text_stores: Sequence[TextStore] = ()


class LogitsRows(NamedTuple):
    """The rows of logits that a step computed for a request: what the target held likely after the
    token before the step's tree, and after each node, rejected ones included."""

    tree: TokenTree
    """The tree that was verified; empty in a step without drafts."""
    accepted: tuple[int, ...]
    """Accepted node indices, root first."""
    tokens: np.ndarray
    """int32 [N + 1, ROW_TOKENS], the likeliest first; contiguous."""
    probabilities: np.ndarray
    """float32 [N + 1, ROW_TOKENS], at temperature 1, whatever the request samples with."""


class VerifiedStep(NamedTuple):
    """The result of a request's last verification."""

    tree: TokenTree
    """The tree as scheduled: the proposed one or a prefix of it."""
    accepted: tuple[int, ...]
    """Accepted node indices, root first."""
    node_argmax: np.ndarray | None
    """int32 [N + 1], the target's argmax after the last committed token and after each node; only
    for drafters with `needs_node_argmax`."""


@dataclass(slots=True)
class DraftRequest:
    """One request of a batch that wants a tree.

    Attributes:
        request_id: The engine's id of the request.
        token_ids: int32 [num_tokens], prompt and output; a view, valid during the call only.
        num_prompt_tokens: Leading tokens of `token_ids` that are the prompt.
        max_nodes: Node limit of the tree, at least 1.
        max_depth: Depth limit of the tree (the room left to the model's length limit), at least 1.
        chain_only: The tree must be a chain (structured outputs).
        hidden_state: torch tensor [hidden_size] of the last accepted position, only for drafters
            with `needs_hidden_states`.
        last_step: The last verification of this request, None before the first.
        rows: Of the step that gave the newest token, where they are known; only for drafters with
            `needs_rows`.
        cache_salt: Only requests with the same salt may profit from one another's text.
        sample_of: The same for all samples of one prompt; None for a request that is no sample.
        is_sampled: Whether it has a temperature.
        extra_args: Of its sampling parameters, as they reach the worker.
        min_probability: Nodes whose path is less likely are not verified; a drafter that knows
            probabilities may leave them out to save time.
    """

    request_id: str
    token_ids: np.ndarray
    num_prompt_tokens: int
    max_nodes: int
    max_depth: int
    chain_only: bool = False
    hidden_state: Tensor | None = None
    last_step: VerifiedStep | None = None
    rows: LogitsRows | None = None
    cache_salt: str | None = None
    min_probability: float = 0.0
    sample_of: str | None = None
    is_sampled: bool = False
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class PreparedDrafts(ABC):
    """Drafts of a batch that wait for nothing but a step's tokens.

    Attributes:
        request_ids: Of the drafts, in their order.
    """

    request_ids: Sequence[str]

    @abstractmethod
    def draft(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draft, as fast as can be: the device waits.

        Args:
            tokens: int64 [requests, N + 1], the step's tokens of each request of its batch.
            counts: int64 [requests], how many of a row there are.

        Returns:
            int [drafts], the length of each chain, and int32 [drafts, N], its tokens and anything
            behind them.
        """

    @abstractmethod
    def trees(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Return the drafts of some of the requests, the same objects as before with the step's
        tokens in their texts.

        Takes the place of :meth:`Drafter.propose` after :meth:`draft`.
        """


class Drafter(ABC):
    """Fills token trees; one object serves all requests of one rank."""

    name: ClassVar[str]
    """The method's name in the configuration."""
    Options: ClassVar[type[BaseModel]]
    """The method's options, set next to `method` in the speculative configuration."""
    needs_hidden_states = False
    needs_node_argmax = False
    needs_rows = False
    reuses_arrays = True
    """Whether it may change the arrays of trees that it has returned; they are copied then."""

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        self.options: Any = options
        self.context = context

    @classmethod  # noqa: B027 - optional, not abstract
    def check_files(cls, options: Any, vocab_size: int, draft_model: str | None) -> None:
        """Check the files that the options name, in the front end, before the engine starts.

        Reads no more than headers: the drafter itself checks the content where it runs.

        Args:
            options: Of type `Options`.
            vocab_size: Of the target model.
            draft_model: As in `DrafterContext`.

        Raises:
            RefusedError: Naming the file, what is wrong with it and what to do.
        """

    @classmethod
    def keeps_texts(cls, options: Any) -> bool:
        """Return whether a drafter with these options keeps the outputs of ended requests, and uses
        the stores of its context. The engine is not started with stores if it does not."""
        return False

    def load_model(self, target_model: nn.Module) -> None:  # noqa: B027 - optional, not abstract
        """Load the drafter's own weights, if it has any, once `target_model` is loaded."""

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:  # noqa: B027 - optional
        """Take in the prompts of new requests, while the device computes their first tokens.

        Saves time of the first call of `propose` with them.
        """

    def prepare(
        self, requests: Sequence[DraftRequest], rows: Sequence[int], num_new: int
    ) -> PreparedDrafts | None:
        """Prepare the drafts after a step of chains whose tokens are not known; None where the
        drafter cannot, and `propose` does it all.

        Args:
            requests: As they were before the step, with rows of logits whose content comes with the
                tokens. All want chains.
            rows: Of the requests in the step's batch.
            num_new: The most tokens that a request gets.
        """
        return None

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Draft a tree for each request, in the same order; `TokenTree.empty()` for no guess.

        Every tensor-parallel rank calls this method with the same requests; rank 0's trees are
        verified on all of them. The trees obey `max_nodes`, `max_depth` and `chain_only`,
        depth-first with the likeliest child first. The call may
        update the drafter's state of each request and does not modify the requests. A request whose
        tokens do not extend those of its last call (it was preempted) starts again.
        """

    def released(  # noqa: B027 - optional, not abstract
        self, request: DraftRequest, output: np.ndarray
    ) -> None:
        """Forget a request that has ended; it may be one that was never drafted for.

        Args:
            request: With its whole text, and room for no node.
            output: int32, the whole output up to the token that ended it, a view that is valid
                during the call only. Empty if the request ended while the drafter was suspended.
        """

    def reset(self) -> None:  # noqa: B027 - optional
        """Forget the outputs of ended requests; called between two steps."""
