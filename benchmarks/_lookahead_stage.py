"""The engine in which the lookahead benchmark's drafters take turns, and what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from _common import Row, median_seconds

from vllm_trie.demo import engines, measure

PARTS = ["ngram_trie", "lookahead_trie", "medusa_dynamic"]
"""Drafters that the engine is started with."""


class TurnTaker:
    """A drafter that hands every call to the one whose turn it is, under its node limit."""

    name = "turns"
    needs_hidden_states = True

    def __init__(self) -> None:
        self.drafter: Any = None
        self.max_nodes = 0

    @property
    def needs_node_argmax(self) -> bool:
        return self.drafter is not None and self.drafter.needs_node_argmax

    def propose(self, requests: Sequence[Any]) -> Any:
        for request in requests:
            request.max_nodes = min(request.max_nodes, self.max_nodes)
        return self.drafter.propose(requests)

    def release(self, request_id: str) -> None:
        if self.drafter is not None:
            self.drafter.release(request_id)


@dataclasses.dataclass
class Counts:
    """Sums over the verified steps of a run."""

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    window: int = 0


class Stage:
    """The engine with trees, in which the drafters take turns."""

    def __init__(self, model: str, heads: str, nodes: int, **limits: int) -> None:
        config = {
            "method": "trie_union",
            "drafters": PARTS,
            "model": heads,
            "num_speculative_tokens": nodes,
            "node_budget": "fixed",
        }
        self.llm = engines.start_engine(model, **limits, speculative_config=config)
        self._runner = engines.runner_of(self.llm)
        self._union = self._runner._guarded.drafter
        self._turns = self._runner._guarded.drafter = TurnTaker()
        self._counts = Counts()
        self._watch_steps()

    def make(
        self, method: str, options: dict[str, Any], nodes: int, cls: Any | None = None
    ) -> Callable[[], Any]:
        """What makes a new drafter for a budget of `nodes` nodes."""
        from vllm_trie.drafters import get_drafter_class, parse_options

        context = dataclasses.replace(self._union.context, num_nodes=nodes)
        medusa = self._union.parts[PARTS.index("medusa_dynamic")]

        def new() -> Any:
            drafter = (cls or get_drafter_class(method))(parse_options(method, options), context)
            for part in getattr(drafter, "parts", [drafter]):
                if part.name == "medusa_dynamic":
                    part._heads, part._reading = medusa._heads, medusa._reading
            return drafter

        return new

    def run(
        self,
        new: Callable[[], Any],
        nodes: int,
        prompts: Sequence[Sequence[int]],
        params: Any,
        batch_size: int,
    ) -> tuple[Any, Counts]:
        """Decode with a new drafter; the outputs, and what was counted."""
        drafter = self._turns.drafter = new()
        self._turns.max_nodes = nodes
        totals, self._counts = self._runner.tree_totals, Counts()
        before = totals.steps, totals.tokens
        outputs = decode(self.llm, prompts, params, batch_size)
        counts = self._counts
        counts.steps, counts.tokens = totals.steps - before[0], totals.tokens - before[1]
        if any(self._runner._guarded.failures.values()):
            raise RuntimeError(f"{drafter.name} failed: {self._runner._guarded.failures}")
        return outputs, counts

    def _watch_steps(self) -> None:
        stock = self._runner._remember_steps

        def remember(*args: Any, **kwargs: Any) -> None:
            stock(*args, **kwargs)
            sizes = getattr(self._turns.drafter, "verification_nodes", {})
            for index, request_id in enumerate(self._runner.input_batch.req_ids):
                tree = self._runner._step_trees[index].tree
                self._counts.nodes += tree.num_nodes
                if tree.num_nodes and tree.never_accept is not None:
                    candidates = sizes.get(request_id, int((~tree.never_accept).sum()))
                    self._counts.window += tree.num_nodes - candidates

        self._runner._remember_steps = remember


def decode(llm: Any, prompts: Sequence[Sequence[int]], params: Any, batch_size: int) -> Any:
    """Outputs of all prompts, `batch_size` at a time."""
    outputs = []
    for group in measure.batches(prompts, batch_size):
        some, _ = measure.generate(llm, [prompts[index] for index in group], params)
        outputs += some
    return outputs


def row_of(method: str, timed: Sequence[Any], expected: Any) -> Row:
    """A row from the repeats of a run, the counts of the first."""
    outputs, counts = timed[0][1]
    num_tokens = sum(map(len, outputs))
    return {
        "method": method,
        "generated_tokens": num_tokens,
        "steps": counts.steps,
        "verification_tokens": counts.nodes - counts.window,
        "window_tokens": counts.window,
        "computed_tokens": counts.steps + counts.nodes,
        "tokens_per_step": num_tokens / counts.steps,
        "tokens_per_s": num_tokens / median_seconds(timed),
        "identical": all(found == expected for _, (found, _) in timed),
    }
