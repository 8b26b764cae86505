"""A step of tree speculation inside a step of vLLM's model runner, for both runners."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from vllm_trie.drafts.engine.start.calibration import calibrate_step_cost
from vllm_trie.drafts.engine.start.draft_support import check_layers
from vllm_trie.drafts.engine.verification.compaction import CacheGroup, cache_groups
from vllm_trie.drafts.engine.verifier import TreeVerifier

Part = Literal[
    "requests",  # the batch's requests are known to vLLM's runner
    "inputs",  # the batch's inputs are laid out
    "positions",  # so are its KV slots
    "masks",  # a grammar's masks are there
    "logits",
    "path",  # the device has walked down the trees
    "tokens",  # the new tokens are there, on Model Runner V2 on the device
    "states",  # the hidden states, too
    "drafts",  # drafts are asked for
    "end",
]
"""What vLLM's runner has done in a step, in this order."""

_ORDER = {part: index for index, part in enumerate(get_args(Part))}

Step = Generator[tuple[Part, Any], Any, None]
"""A step. ``made = yield part, result`` gives `result` to the override that has resumed it, and
waits until a later `part` of vLLM's is done and has made something."""


class Adapter(ABC):
    """The plugin's part in the steps of a model runner, whose overrides resume it.

    Args:
        verifier: Of this rank.

    Attributes:
        chain_only: Whether vLLM verifies the drafts, as chains.
        runner: Of this rank, once there is one.
        waits_for: The part of vLLM's that the step waits for.
    """

    chain_only: bool
    runner: Any

    def __init__(self, verifier: TreeVerifier) -> None:
        self.verifier = verifier
        self.waits_for: Part = "end"
        self._step: Step

    @property
    @abstractmethod
    def running(self) -> Collection[str]:
        """Ids of the requests whose end is not known here."""

    @abstractmethod
    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""

    @abstractmethod
    def run_forward(self, num_tokens: int) -> None:
        """Run a forward pass of `num_tokens` tokens and wait for its end."""

    def begin_step(self, step: Step) -> Any:
        """Begin a step; return what it has for vLLM. One that vLLM left where it was is over."""
        self._step = step
        self.waits_for, result = next(step)
        return result

    def resume(self, part: Part, made: Any = None) -> Any:
        """Resume the step after a part of vLLM's; return what the step has for the next one.

        Parts before it that vLLM left out, as they had no rows, are None to the step. Parts that
        the step does not wait for change nothing.
        """
        result = None
        while _ORDER[self.waits_for] <= _ORDER[part]:
            sent = made if self.waits_for == part else None
            try:
                self.waits_for, result = self._step.send(sent)
            except StopIteration:
                self.waits_for, result = "end", None
            if self.waits_for == "end":
                self._step.close()  # it holds tensors
        return result

    def forget_rows(self) -> None:  # noqa: B027 - optional
        """Forget rows of logits of steps whose tokens are not taken in: weights are others."""

    def forget_stats(self) -> None:
        """Forget the statistics of requests that no user sent."""
        self.verifier.forget_stats()

    def switch_off(self, why: str) -> None:
        """Serve without drafts, and with a count."""
        self.waits_for = "end"
        self.verifier.guard.switch_off(why)

    def close(self) -> None:
        """Save what was learned; the engine ends."""
        # The scheduler tells of ended requests with the next step, and there is none.
        self.release(list(self.running))
        self.verifier.close()

    def load_model(self, target_model: torch.nn.Module, *unused: Any, **unused_too: Any) -> None:
        """Load the drafter's own weights, if it has any; refuse a model that verifies no trees."""
        self.verifier.guard.drafter.load_model(target_model)
        if not self.chain_only:
            layers = self.runner.compilation_config.static_forward_context
            check_layers(self.runner.vllm_config, layers)

    def warm_up(self) -> None:
        """Let the node budget observe forward passes; the runner is ready and has no requests."""
        runner = self.runner
        num_ranks = runner.parallel_config.world_size_across_dp
        computes = runner.device.type == "cpu" and num_ranks == 1
        clock = time.thread_time if computes else time.perf_counter
        calibrate_step_cost(
            self.verifier.budget, self.run_forward, runner.max_num_tokens, num_ranks, clock=clock
        )

    @cached_property
    def cache_groups(self) -> list[CacheGroup]:
        layers = self.runner.compilation_config.static_forward_context
        return cache_groups(self.runner.kv_cache_config, layers)
