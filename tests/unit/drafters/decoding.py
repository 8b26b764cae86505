"""Decode with a drafter and a toy model, as the engine would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.unit.drafters.support import make_request
from vllm_trie.drafts import Drafter, VerifiedStep
from vllm_trie.tree import TokenTree, accept_greedy

Target = Callable[[Sequence[int]], int]
"""The greedy next token after the tokens that are seen."""


def toy_target(vocab_size: int, order: int = 2) -> Target:
    """A model whose next token depends on the last `order` tokens, so that text repeats itself."""

    def target(tokens: Sequence[int]) -> int:
        value = 7
        for token in tokens[-order:]:
            value = value * 31 + token * 17 + 5
        return value // 3 % vocab_size

    return target


def verify(tree: TokenTree, tokens: Sequence[int], target: Target) -> VerifiedStep:
    """What a target model says after the last token and after each node."""
    paths: list[list[int]] = []
    argmax = [target(tokens)]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        argmax.append(target([*tokens, *paths[-1]]))
    never = None if tree.never_accept is None else tree.never_accept.tolist()
    accepted = accept_greedy(tree.token_ids.tolist(), tree.parents.tolist(), argmax, never)
    return VerifiedStep(tree, tuple(accepted), np.array(argmax, dtype=np.int32))


def new_tokens(step: VerifiedStep) -> list[int]:
    """The accepted nodes' tokens and the bonus token."""
    assert step.node_argmax is not None
    last = step.accepted[-1] + 1 if step.accepted else 0
    return [*(int(step.tree.token_ids[i]) for i in step.accepted), int(step.node_argmax[last])]


class Decoding:
    """One request that is decoded step by step."""

    def __init__(
        self, drafter: Drafter, prompt: Sequence[int], target: Target, request_id: str = "a"
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt)
        # The prefill yields the first token.
        self.tokens = [*prompt, target(prompt)]
        self.last_step: VerifiedStep | None = None
        self.tree = TokenTree.empty()

    def step(self, keep: int | None = None, **limits: Any) -> list[int]:
        """Draft, schedule the first `keep` nodes, verify; returns the new tokens."""
        request = make_request(
            self.tokens,
            self.request_id,
            self.num_prompt_tokens,
            last_step=self.last_step,
            **{"max_nodes": self.drafter.context.num_nodes, **limits},
        )
        [self.tree] = self.drafter.propose([request])
        request.token_ids[:] = 0  # a row of the batch, which others take
        self.tree.validate(self.drafter.context.vocab_size, request.max_nodes)
        if self.tree.num_nodes:
            assert self.tree.depths().max() <= request.max_depth
        scheduled = self.tree if keep is None else self.tree.prefix(keep)
        self.last_step = verify(scheduled, self.tokens, self.target)
        new = new_tokens(self.last_step)
        self.tokens += new
        return new

    def step_anyhow(self, data: st.DataObject) -> None:
        """A step as schedulers may make it: a draft that is cut, other limits, none at all."""
        most_nodes = self.drafter.context.num_nodes
        match data.draw(st.integers(0, 4)):
            case 0:
                self.step(keep=data.draw(st.integers(0, most_nodes)))
            case 1:
                self.step(max_nodes=data.draw(st.integers(1, most_nodes)))
            case 2:
                self.step(max_depth=data.draw(st.integers(1, 12)))
            case 3:
                self.last_step = None
                self.step()
            case _:
                self.step(chain_only=data.draw(st.booleans()))

    def check_text(self) -> None:
        """The text must be what the target says by itself."""
        expected = self.tokens[: self.num_prompt_tokens]
        while len(expected) < len(self.tokens):
            expected.append(self.target(expected))
        assert self.tokens == expected
