"""A decoding step of the plugin without an engine: its own code, with arrays in place of a model.

Everything that the plugin runs in a step of Model Runner V1 is the real code, drafter included; the
logits, the KV cache and vLLM's batch are stand-ins. So a step costs what the plugin costs.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from vllm_trie.attention import TreeBatch
from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import Drafter, DrafterContext, DrafterOptions, DraftRequest
from vllm_trie.drafters.ngram_trie import NgramTrieDrafter, NgramTrieOptions
from vllm_trie.tree import TokenTree, depth_first_layout
from vllm_trie.vllm_hooks.worker import verifier as verifier_module
from vllm_trie.vllm_hooks.worker.drafting import requests as requests_module
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.verification import compaction
from vllm_trie.vllm_hooks.worker.verification.placement import QueryTokens, logits_tokens
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

VOCAB = 512
PROMPT = 1000
LAYERS, HEADS, BLOCK, HEAD_SIZE = 12, 4, 16, 64
MAX_LEN = 8192
GREEDY: Any = SimpleNamespace(
    all_greedy=True,
    max_num_logprobs=None,
    logprob_token_ids=None,
    no_penalties=True,
    bad_words_token_ids=None,
    allowed_token_ids_mask=None,
    thinking_budget_state_holder=None,
    logitsprocs=SimpleNamespace(non_argmax_invariant=[]),
)
_STEP_SECONDS = 0.1
DRAFTER = "drafter"
ARGMAX = "argmax of the logits"
NOT_OWN = (DRAFTER, ARGMAX)
"""Parts that are not the plugin's own time of a step: drafting is counted for itself, and vLLM
takes the argmax in a step without drafts too."""


class PreparedTrees(Drafter):
    """Random trees of the largest size that were made before: drafting costs next to nothing."""

    name = "prepared_trees"
    Options = DrafterOptions
    reuses_arrays: ClassVar[bool] = False

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(DrafterOptions(), context)
        rng = np.random.default_rng(0)
        self._stock = [random_tree(rng, context.num_nodes) for _ in range(61)]
        self._next = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self._next += len(requests)
        return [
            TokenTree(tree.token_ids, tree.parents, tree.probabilities)  # without cached lists
            for tree in (
                self._stock[(self._next - i) % len(self._stock)] for i in range(len(requests))
            )
        ]


def random_tree(rng: np.random.Generator, num_nodes: int) -> TokenTree:
    """Return a tree that leans to one path, as drafters' trees do, without repeated siblings."""
    parents = [-1]
    for node in range(1, num_nodes):
        deepens = rng.random() < 0.6
        parents.append(node - 1 if deepens else int(rng.integers(-1, node)))
    tokens = rng.permutation(VOCAB)[:num_nodes]
    probabilities: list[float] = []
    for parent in parents:
        above = 1.0 if parent < 0 else probabilities[parent]
        probabilities.append(above * rng.uniform(0.5, 0.99))
    return depth_first_layout(TokenTree.from_lists(tokens, parents, probabilities))


class Parts:
    """CPU time of this thread by part of a step, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()
            result = call(*args, **kwargs)
            took = time.thread_time() - start
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took
            return result

        return run


class PluginStep:
    """A batch of requests that decode with full trees.

    Args:
        num_requests, num_nodes: of the batch; nodes of each tree.
        drafts: `full` for prepared trees, `text` for the method `ngram_trie` in a text that repeats
            itself, `none` for no drafts.
        parts: where to count; the whole step is timed without them.
    """

    def __init__(
        self, num_requests: int, num_nodes: int, drafts: str, parts: Parts | None = None
    ) -> None:
        self._num_nodes = num_nodes if drafts != "none" else 0
        self._rng = np.random.default_rng(1)
        context = DrafterContext(VOCAB, MAX_LEN, num_requests, num_nodes)
        drafter: Drafter = PreparedTrees(context)
        if drafts == "text":
            drafter = NgramTrieDrafter(NgramTrieOptions(recycle=False), context)
        guard = GuardedDrafter(drafter, VOCAB, 30.0, logging.getLogger(__name__))
        budget = NodeBudget()
        for num_tokens in (1, 64, 2048):
            budget.expect_step(num_tokens, _STEP_SECONDS)
        self.verifier = TreeVerifier(guard, budget)
        clock: Any = self.verifier._clock
        clock.stop = lambda: _STEP_SECONDS  # a node costs nothing, so that all trees stay full
        self._ids = [f"request-{i}-with-a-long-name" for i in range(num_requests)]
        text = np.tile(self._rng.integers(0, VOCAB, PROMPT // 4), 5)
        self._batch = _batch(self._ids, text)
        params = SamplingParams(max_tokens=MAX_LEN, temperature=0.0)
        self._states: dict[str, Any] = {
            request_id: SimpleNamespace(
                sampling_params=params,
                prompt_token_ids=text[:PROMPT].tolist(),
                lora_request=None,
                output_token_ids=[0],
            )
            for request_id in self._ids
        }
        cache = [torch.zeros(400, HEADS, BLOCK, 2 * HEAD_SIZE) for _ in range(LAYERS)]
        self._groups = [compaction.CacheGroup(0, tuple(cache))]
        self._drafts: list[list[int]] = [[] for _ in self._ids]
        self._calls = _calls(self.verifier, parts)

    def run(self) -> float:
        """Run a step; return its seconds of CPU time without the stand-ins'."""
        calls, verifier, batch = self._calls, self.verifier, self._batch
        counts = np.array([len(draft) for draft in self._drafts])
        ends = np.cumsum(counts + 1, dtype=np.int32)
        num_tokens = int(ends[-1])
        starts = np.concatenate([[0], ends]).astype(np.int32)
        computed = batch.num_tokens_no_spec - 1
        positions, ids = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(num_tokens)
        slots = torch.arange(num_tokens, dtype=torch.int64)
        scheduled = {
            request_id: draft
            for request_id, draft in zip(self._ids, self._drafts, strict=True)
            if draft
        }
        logits = self._logits(num_tokens)
        start = time.thread_time()
        calls["start"](len(self._ids))
        calls["begin"](self._ids, scheduled, num_tokens)
        if scheduled:
            tokens = QueryTokens(starts, computed, positions, ids)
            calls["place"](tokens, True)
            if verifier.tree_batch is not None:
                calls["arrays"](verifier.tree_batch)
            calls["logits rows"](counts, ends)
        output = calls["verify"](logits, _Sampler(), GREEDY)
        if verifier.tree_batch is not None:
            calls["compact"](self._groups, [slots])
        took = time.thread_time() - start
        new_tokens = [[t for t in row if t >= 0] for row in output.sampled_token_ids.tolist()]
        self._append(new_tokens)
        start = time.thread_time()
        calls["end"](new_tokens)
        drafting_since = time.perf_counter()
        self._drafts = [[] for _ in self._ids]
        if self._num_nodes:
            requests = calls["requests"](
                batch, self._states, new_tokens, MAX_LEN, self._num_nodes, False
            )
            self._drafts = calls["draft"](requests, len(self._ids), logits, drafting_since)
        calls["stats"]()
        return took + time.thread_time() - start

    def _logits(self, num_rows: int) -> torch.Tensor:
        """Return logits that follow a path of each tree for some nodes, not always the leading."""
        logits = torch.zeros(num_rows, VOCAB)
        next_tokens = self._rng.integers(0, VOCAB, num_rows)
        row = 0
        for request_id, draft in zip(self._ids, self._drafts, strict=True):
            tree = self.verifier._stored_trees.get(request_id)
            if draft and tree is not None:
                node = -1
                while self._rng.random() < 0.7:
                    children = np.flatnonzero(tree.parents == node)
                    if not len(children):
                        break
                    child = int(children[0 if self._rng.random() < 0.7 else -1])
                    next_tokens[row + node + 1] = tree.token_ids[child]
                    node = child
            row += len(draft) + 1
        logits[torch.arange(num_rows), torch.from_numpy(next_tokens)] = 1.0
        return logits

    def _append(self, new_tokens: list[list[int]]) -> None:
        batch = self._batch
        for i, (request_id, tokens) in enumerate(zip(self._ids, new_tokens, strict=True)):
            size = int(batch.num_tokens_no_spec[i])
            if size + 2 * self._num_nodes + 2 > batch.token_ids_cpu.shape[1]:
                raise ValueError("the texts are full; run fewer steps")
            batch.token_ids_cpu[i, size : size + len(tokens)] = tokens
            batch.num_tokens_no_spec[i] += len(tokens)
            self._states[request_id].output_token_ids += tokens


class _Sampler:
    """vLLM's sampler for steps without drafts: its time is not the plugin's."""

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=logits.argmax(-1, keepdim=True))


def _arrays(trees: TreeBatch) -> None:
    """Make what the kernel of the first layer reads."""
    assert len(trees.row_array)
    assert len(trees.word_array)


def _calls(verifier: TreeVerifier, parts: Parts | None) -> dict[str, Callable[..., Any]]:
    """Return the calls of a step, and count the parts inside them."""
    calls: dict[str, Callable[..., Any]] = {
        "start": verifier.start_step,
        "begin": verifier.begin_step,
        "place": verifier.place,
        "arrays": _arrays,
        "logits rows": logits_tokens,
        "verify": verifier.verify,
        "compact": verifier.compact,
        "end": verifier.end_step,
        "requests": requests_module.draft_requests,
        "draft": verifier.draft,
        "stats": verifier.take_stats,
    }
    if parts is None:
        return calls
    budget: Any = verifier.budget
    guard: Any = verifier.guard
    guard.drafter.propose = parts.timed(DRAFTER, guard.drafter.propose)
    guard.propose = parts.timed("check of the trees", guard.propose)
    budget.cut = parts.timed("budget: cut", budget.cut)
    budget.least_probabilities = parts.timed("budget: least", budget.least_probabilities)
    budget.observe_verified = parts.timed("budget: verified", budget.observe_verified)
    budget.observe_step = parts.timed("budget: step", budget.observe_step)
    module: Any = verifier_module
    module.argmax_of_logits = parts.timed(ARGMAX, module.argmax_of_logits)
    return {name: parts.timed(name, call) for name, call in calls.items()}


def _batch(request_ids: list[str], text: np.ndarray) -> Any:
    """Return a stand-in for vLLM's InputBatch after a prefill of the same text."""
    tokens = np.zeros((len(request_ids), MAX_LEN), dtype=np.int32)
    tokens[:, : PROMPT + 1] = text[: PROMPT + 1]
    return SimpleNamespace(
        req_ids=request_ids,
        token_ids_cpu=tokens,
        num_tokens_no_spec=np.full(len(request_ids), PROMPT + 1, dtype=np.int32),
        num_prompt_tokens=np.full(len(request_ids), PROMPT, dtype=np.int32),
    )
