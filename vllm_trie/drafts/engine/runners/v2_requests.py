"""The text of each request on the host, on Model Runner V2, whose own lies on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_trie.drafts.engine.draft_requests import draft_request, ended_request, ends_with
from vllm_trie.hooks.wire import may_draft

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_trie.drafts import DraftRequest


@dataclass(slots=True)
class RequestText:
    """A request's text on the host, where drafters read it; the runner's own is on the device.

    Attributes:
        data: As the scheduler sent it.
        token_ids: int32 [capacity], the text so far and room for the rest of it.
        num_tokens: Length of the text.
        may_draft: Whether it may have drafts.
        has_ended: Whether the text ends here. Scheduled ahead, the request may run once more.
        drafted: The draft tokens of the next step.
    """

    data: NewRequestData
    token_ids: np.ndarray
    num_tokens: int
    may_draft: bool
    has_ended: bool = False
    drafted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, data: NewRequestData, max_model_len: int) -> RequestText:
        text = data.prefill_token_ids or []
        token_ids = np.empty(max(max_model_len, len(text)), dtype=np.int32)
        token_ids[: len(text)] = text
        return cls(data, token_ids, len(text), may_draft(data))

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.data.prompt_len

    def draft_request(
        self, max_model_len: int, max_nodes: int, needs_chain: Callable[[SamplingParams], bool]
    ) -> DraftRequest | None:
        """Return the request as drafters see it, None if it gets no draft."""
        params = self.data.sampling_params
        if params is None:
            return None
        return draft_request(
            self.data.req_id,
            self.data,
            self._text(),
            self.data.prompt_len,
            self.num_output_tokens,
            max_model_len,
            max_nodes,
            chain_only=needs_chain(params),
        )

    def ended_request(self) -> DraftRequest | None:
        """Return the request with its whole text as drafters see it, None if it never gets
        drafts."""
        return ended_request(self.data.req_id, self.data, self._text(), self.data.prompt_len)

    def _text(self) -> np.ndarray:
        text = self.token_ids[: self.num_tokens]
        text.flags.writeable = False
        return text

    def extend(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add sampled tokens to the text; return those before its end."""
        params = self.data.sampling_params
        assert params is not None
        taken = 0
        while taken < len(tokens) and not self.has_ended and self.num_tokens < len(self.token_ids):
            token = tokens[taken]
            self.token_ids[self.num_tokens] = token
            self.num_tokens += 1
            taken += 1
            num_output = self.num_output_tokens
            is_last = num_output == params.max_tokens
            self.has_ended = is_last or ends_with(params, token, num_output)
        return tokens[:taken]
