"""The method `medusa_dynamic`: Medusa heads fill a tree that is chosen anew at each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from vllm_trie.drafts.drafter import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafts.ngrams import Candidates, Job, NativeBackend
from vllm_trie.drafts.request_texts import INDEX_TOKENS, IndexedText, RequestTexts
from vllm_trie.extras.heads.candidates import BLEND, top_candidates
from vllm_trie.extras.heads.heads import MedusaHeads
from vllm_trie.extras.heads.options import MedusaOptions
from vllm_trie.extras.heads.output_layer import target_output_layer
from vllm_trie.extras.heads.reading import CheckpointError, check_file, load_checkpoint
from vllm_trie.refusal import RefusedError
from vllm_trie.tree import TokenTree

_NO_HEADS = (
    "method 'medusa_dynamic' needs the Medusa heads, and no model was given; name the folder of a "
    "Medusa checkpoint as 'model' in speculative_config (--speculative-config "
    '\'{"model": "HEADS"}\'), or as --spec-model next to --spec-method'
)
_NO_TEXT = IndexedText(None, 0, 0, np.empty(0, dtype=np.int32), 0)


class MedusaDrafter(Drafter):
    """Drafts from the hidden state of the last accepted position.

    State: with `joint="context"`, an index of each request's own text. The heads are the same on
    every tensor-parallel rank: hidden states are whole on each of them.

    Attributes:
        heads: The heads, None until they are loaded.
        temperatures: float32 [K], one for each head that is used; None until they are loaded.
    """

    name: ClassVar[str] = "medusa_dynamic"
    Options: ClassVar[type[BaseModel]] = MedusaOptions
    needs_hidden_states = True

    def __init__(self, options: MedusaOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        if context.draft_model is None:
            raise RefusedError(_NO_HEADS)
        self._device = torch.device(context.device)
        self._dtype = getattr(torch, context.dtype)
        self._backend = NativeBackend(BLEND)
        self._texts: RequestTexts | None = None
        if options.joint == "context":
            self._texts = RequestTexts(self._backend, options.max_context_len, INDEX_TOKENS)
        self._max_depth = options.max_depth or context.max_model_len
        self.heads: MedusaHeads | None = None
        self.temperatures: Tensor | None = None

    @classmethod
    def check_files(cls, options: MedusaOptions, vocab_size: int, draft_model: str | None) -> None:
        if draft_model is None:
            raise RefusedError(_NO_HEADS)
        check_file(draft_model)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads onto the target's device, in its dtype.

        Raises:
            CheckpointError: The checkpoint is missing or damaged, or does not fit the target or
                the options.
        """
        context = self.context
        assert context.draft_model is not None
        loaded = load_checkpoint(
            context.draft_model,
            context.hidden_size,
            context.vocab_size,
            lambda: target_output_layer(target_model, context),
            context.draft_revision,
        )
        num_heads = self.options.num_heads or loaded.heads.shape.num_heads
        if num_heads > loaded.heads.shape.num_heads:
            raise CheckpointError(
                f"num_heads={num_heads}, but the checkpoint {Path(context.draft_model).name!r} has "
                f"{loaded.heads.shape.num_heads} heads; lower num_heads or leave it out"
            )
        self.set_heads(loaded.heads, loaded.temperatures[:num_heads])

    def set_heads(self, heads: MedusaHeads, temperatures: Sequence[float] | Tensor) -> None:
        """Use these heads, as many as there are temperatures; moves them to the target's device
        and dtype."""
        self.heads = heads.to(self._device, self._dtype).requires_grad_(False)
        if not self.options.calibrate:
            temperatures = [1.0] * len(temperatures)
        self.temperatures = torch.as_tensor(temperatures, dtype=torch.float32, device=self._device)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        drafts = self._backend.draft_batch(self._jobs(requests), self.candidates(requests))
        return [draft.tree for draft in drafts]

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
        """Return each head's candidates, [requests, K, m], after the requests' hidden states."""
        if self.heads is None or self.temperatures is None:
            raise RuntimeError("the Medusa heads are not loaded: call load_model first")
        states = [request.hidden_state for request in requests if request.hidden_state is not None]
        logits = self.heads(torch.stack(states).to(self._dtype), len(self.temperatures))
        return top_candidates(
            logits, self.temperatures, self.heads.token_map, self.options.top_tokens
        )

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        if self._texts is not None:
            self._texts.release(request.request_id)

    def _depth(self, request: DraftRequest) -> int:
        return min(request.max_depth, self._max_depth)

    def _jobs(self, requests: Sequence[DraftRequest]) -> list[Job]:
        texts = [_NO_TEXT] * len(requests) if self._texts is None else self._texts.update(requests)
        return [
            Job(
                own=text.own,
                store=None,
                archive=None,
                tokens=text.tokens,
                num_indexed=text.num_indexed,
                max_nodes=request.max_nodes,
                max_depth=self._depth(request),
                chain_only=request.chain_only,
                min_probability=request.min_probability,
                first=text.first,
                text=text.text,
            )
            for request, text in zip(requests, texts, strict=True)
        ]
