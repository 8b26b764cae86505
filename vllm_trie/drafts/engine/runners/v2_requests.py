"""The text of each request on the host, on Model Runner V2, whose own lies on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_trie.drafts.engine.draft_requests import (
    constant_fields,
    draft_request,
    ended_request,
    ends_with,
)
from vllm_trie.hooks.wire import may_draft

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_trie.drafts import DraftRequest


@dataclass(slots=True)
class RequestText:
    """A request's text on the host, where drafters read it; the runner's own is on the device.

    Attributes:
        request_id, params: The request's.
        constant: What drafters see of it in each step.
        may_draft: Whether it may have drafts.
        token_ids: int32 [capacity], the text so far and room for the rest of it.
        view: The same, read-only.
        num_prompt_tokens, num_tokens: Length of the prompt and of the text.
        is_unread: Whether the drafter has not seen the prompt.
        has_ended: Whether the text ends here. Scheduled ahead, the request may run once more.
        drafted: The draft tokens of the next step.
    """

    request_id: str
    params: SamplingParams
    constant: Mapping[str, Any]
    may_draft: bool
    token_ids: np.ndarray
    view: np.ndarray
    num_prompt_tokens: int
    num_tokens: int
    is_unread: bool = True
    has_ended: bool = False
    drafted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, data: NewRequestData, max_model_len: int) -> RequestText:
        """Return the text of a request as the scheduler sends it, of which it keeps nothing."""
        params = data.sampling_params
        assert params is not None, "the engine generates text"
        text = data.prefill_token_ids or []
        token_ids = np.empty(max(max_model_len, len(text)), dtype=np.int32)
        token_ids[: len(text)] = text
        view = token_ids.view()
        view.flags.writeable = False
        constant = constant_fields(data.req_id, data, data.prompt_len)
        return cls(
            *(data.req_id, params, constant, may_draft(data)),
            *(token_ids, view, data.prompt_len, len(text)),
        )

    def draft_request(
        self, max_model_len: int, max_nodes: int, chain_only: bool
    ) -> DraftRequest | None:
        """Return the request as drafters see it, None if it gets no draft."""
        if not self.may_draft or self.has_ended:
            return None
        return draft_request(
            self.constant,
            self.params,
            self.view[: self.num_tokens],
            self.num_tokens - self.num_prompt_tokens,
            max_model_len,
            max_nodes,
            chain_only,
        )

    def goes_on(self, request: DraftRequest, new_tokens: Sequence[int]) -> bool:
        """Let a request, as drafters saw it before its new tokens, go on with them; return whether
        it gets a draft."""
        request.token_ids = self.view[: self.num_tokens]
        request.max_depth -= len(new_tokens)
        return bool(new_tokens) and not self.has_ended and request.max_depth > 0

    def ended_request(self) -> DraftRequest:
        """Return the request with its whole text as drafters see it."""
        text = self.view[: self.num_tokens if self.may_draft else 0]
        return ended_request(self.constant, self.params, text)

    def extend(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add sampled tokens to the text; return those before its end."""
        params = self.params
        room = 0 if self.has_ended else len(self.token_ids) - self.num_tokens
        tokens = tokens[:room]
        num_output = self.num_tokens - self.num_prompt_tokens
        for taken, token in enumerate(tokens, 1):
            is_last = num_output + taken == params.max_tokens
            if is_last or ends_with(params, token):
                self.has_ended = True
                tokens = tokens[:taken]
                break
        end = self.num_tokens + len(tokens)
        self.token_ids[self.num_tokens : end] = tokens
        self.num_tokens = end
        return tokens
