"""What :mod:`tests.engine.v2_run` does with trees; imported by that program only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.engine.drafters import NoOptions, OracleDrafter
from tests.engine.test_random_requests import Answer, Request, random_request
from vllm_trie.attention import choose_kernels
from vllm_trie.drafts.engine.verification.kernels import (
    NO_PARENT,
    likeliest_on_device,
    walk_trees,
)
from vllm_trie.drafts.ngrams.native import ROW_TOKENS
from vllm_trie.lab.local_engine import runner_of, verifier_of
from vllm_trie.tree import TokenTree, accept_greedy

LONGEST_PROMPT, LONGEST_OUTPUT = 90, 9


def random_requests(count: int, seed: int) -> list[Request]:
    """Requests with any sampling parameters, short enough for the interpreter."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        request = random_request(rng, seeds=True)
        params = request.params
        params.max_tokens = min(params.max_tokens, LONGEST_OUTPUT)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        params.n = min(params.n, 2)
        if params.logprobs is None and rng.random() < 0.3:
            params.logprob_token_ids = [rng.randrange(100) for _ in range(3)]
        if params.allowed_token_ids:
            params.allowed_token_ids = params.allowed_token_ids[:1000]  # V2 takes 1024
        tokens = request.prompt["prompt_token_ids"][: rng.randint(1, LONGEST_PROMPT)]
        requests.append(
            replace(
                request,
                prompt={"prompt_token_ids": tokens},
                arrives_at=rng.randrange(2 * count),
                aborted_after=request.aborted_after and rng.randint(1, 12),
            )
        )
    return requests


def put_in(llm: Any, drafter: type) -> None:
    """Let an engine draft with a test drafter."""
    runner_of(llm).adapter.draft()  # after the step before, by the drafter of that step
    guard = verifier_of(llm).guard
    guard.drafter = drafter(NoOptions(), guard.drafter.context)


def tell_oracle_of(requests: Sequence[Request], answers: dict[int, list[Answer]]) -> None:
    for index, choices in answers.items():
        prompt = tuple(requests[index].prompt["prompt_token_ids"])
        OracleDrafter.answers[prompt] = choices[0].token_ids


def differing(
    requests: Sequence[Request], expected: dict[int, list[Answer]], answers: dict[int, list[Answer]]
) -> list[str]:
    """Random requests whose answers differ."""
    problems = [] if expected.keys() == answers.keys() else [f"{expected.keys() ^ answers.keys()}"]
    for index in expected.keys() & answers.keys():
        for left, right in zip(expected[index], answers[index], strict=True):
            same = (left.token_ids, left.text, left.ended) == (
                right.token_ids,
                right.text,
                right.ended,
            )
            if not same or not _close(left.logprobs, right.logprobs):
                problems.append(f"{index}: {left} against {right} for {requests[index].params}")
    return problems


def _close(expected: list[dict[int, float]], logprobs: list[dict[int, float]]) -> bool:
    return len(expected) == len(logprobs) and all(
        a.keys() == b.keys()
        # Masked tokens have -inf on both sides.
        and all(a[token] == b[token] or abs(a[token] - b[token]) < 1e-4 for token in a)
        for a, b in zip(expected, logprobs, strict=True)
    )


def differing_walks(num_batches: int) -> list[str]:
    """Random batches in which the kernel's walk is not that of its readable twin."""
    rng = np.random.default_rng(0)
    problems = []
    for batch in range(num_batches):
        trees = [_random_tree(rng, int(rng.integers(0, 12))) for _ in range(5)]
        num_rows = [tree.num_nodes + 1 for tree in trees]
        first_rows = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
        sampled = rng.integers(0, 3, first_rows[-1])
        tokens = np.zeros(first_rows[-1], dtype=np.int32)
        parents = np.full(first_rows[-1], NO_PARENT, dtype=np.int32)
        for first, tree in zip(first_rows, trees, strict=False):
            rows = slice(first + 1, first + 1 + tree.num_nodes)
            tokens[rows] = tree.token_ids
            parents[rows] = np.where(tree.never_accept, NO_PARENT, tree.parents + 1)
        walked = walk_trees(*map(torch.from_numpy, (sampled, tokens, parents, first_rows)), 13)
        for index, (first, tree) in enumerate(zip(first_rows, trees, strict=False)):
            rows_sampled = sampled[first : first + tree.num_nodes + 1].tolist()
            path = accept_greedy(tree.token_list, tree.parent_list, rows_sampled, tree.never_accept)
            rows = [0, *(node + 1 for node in path), *range(len(path) + 1, tree.num_nodes + 1)]
            count = int(walked.num_tokens[index])
            walk = (
                walked.rows[first : first + len(rows_sampled)].tolist(),
                walked.tokens[index, :count].tolist(),
            )
            if walk != (
                [first + row for row in rows],
                [rows_sampled[row] for row in rows[: len(path) + 1]],
            ):
                problems.append(f"batch {batch}, request {index}: {walk}")
    return problems


def differing_top_tokens(number: int) -> list[str]:
    """Random rows of which the kernel takes other tokens for the likeliest than its readable
    twin."""
    problems = []
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        size = 8 + seed * 1000  # of several parts, too
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        logits = torch.randn(3, size + 5, generator=generator).to(dtype)[:, :size]
        logits[0, : size - 8] = -torch.inf
        expected = choose_kernels().likeliest(logits, ROW_TOKENS)
        tokens, probabilities = map(torch.from_numpy, expected)
        kernel_tokens, kernel_probabilities = likeliest_on_device(logits)
        # Equal values may come in another order.
        values = [logits.gather(1, part.long()) for part in (tokens, kernel_tokens)]
        if not torch.equal(*values) or not torch.allclose(probabilities, kernel_probabilities):
            problems.append(f"{size} tokens, {dtype}: {kernel_tokens}, {kernel_probabilities}")
    return problems


def _random_tree(rng: np.random.Generator, num_nodes: int) -> TokenTree:
    """A tree of few different tokens, so that walks are long; some nodes must not be accepted."""
    edges: dict[tuple[int, int], int] = {}
    for _ in range(num_nodes):
        parent = int(rng.integers(-1, len(edges)))
        edges.setdefault((parent, int(rng.integers(0, 3))), len(edges))
    tree = TokenTree.from_lists([token for _, token in edges], [parent for parent, _ in edges])
    never = rng.random(tree.num_nodes) < 0.1
    return TokenTree(tree.token_ids, tree.parents, None, never)
