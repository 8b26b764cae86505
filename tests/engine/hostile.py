"""Hostile requests over HTTP: every option of the plugin, right, wrong and absurd.

`python -m tests.engine.hostile --requests 5000 --seed 1` attacks longer than the suite does.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.engine.serving import MODEL_NAME, Server, running
from tests.extras.items.unit.catalogues import random_items, write
from vllm_trie.searches.engine.constraint import option_names

INTEGERS = random_items(1, 600, 0, (4, 4), branching=60)
TEXTS = random_items(2, 300, 0, (1, 5), branching=40)
"""Items of two catalogues; both have fewer nodes than the vocabulary has tokens."""
MIXED = random_items(5, 500, 0, (1, 4), branching=40)
"""Of a third one, which is not attacked."""

LIMITS = (0, 1, -1, 3, 255, 4096, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40)
ABSURD: tuple[Any, ...] = (
    *LIMITS,
    *(0.5, -0.0, 1e308, 1e-320, "", "a", "\ud800", "\0", "true", "9" * 5000, "x" * 300_000),
    *("[]", "[[", "[" * 50_000, "{}", "[1, 2]", "[[1, 2], [3]]", '["\\ud800"]', "[1e999]", "null"),
    *([], [0], [1, 2, 3], ["a"], ["\ud800"], [*range(5000)], ["x" * 100_000], [2**63], [1.5]),
    *([-(2**63) - 1], [1, "a"], [[1]], {"a": 1}, True, False, None),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "beam_width": (1, 2, 4, 8),
    "length_penalty": (0.0, 1, -2.0, 5.0),
    "early_stopping": (True, "never", "false", 0),
    "do_sample": (True, 0, "true"),
    "no_repeat_ngram_size": (0, 1, 3),
    "num_beam_groups": (1, 2),
    "diversity_penalty": (0.0, 0.5),
    "beam_trace": (1, True),
    "detokenize": (0, 1, "false"),
    "items": ("integers", "texts"),
    "items_end": ("complete", "eos"),
    "normalize": ("vocabulary", "valid"),
    "weight_factor": (0.0, 1.5),
    "allow_items": ([1001, 1002, 7], ["item 1001"], "[1003]", []),
    "allow_prefixes": ("[[5], [9, 70]]", "[[1]]"),
    "deny_items": ([1001], ["item 1000"], [*range(1000, 1500)]),
    "deny_prefixes": ("[[2], [3]]",),
    "speculation": (0, 1, "false"),
    "speculation_trace": (1, 0),
    "vllm_trie_cache_salt": ("tenant",),
    "vllm_trie_beam": ({"n": 1},),
    "vllm_trie_item": ("{}",),
    "beam_widht": (4,),
    "num_beams": (4,),
    "someone_elses": ("option", 3),
}
"""Values of each option that are right, alone or together with others."""
assert not option_names().keys() - OPTIONS.keys(), "an option that is not attacked"

TOGETHER = (
    ("beam_width", "length_penalty", "early_stopping", "no_repeat_ngram_size", "beam_trace"),
    ("beam_width", "num_beam_groups", "diversity_penalty", "do_sample"),
    ("beam_width", "items", "items_end", "normalize", "weight_factor", "length_penalty"),
    ("beam_width", "items", "allow_items", "allow_prefixes", "deny_items", "deny_prefixes"),
    ("items", "items_end", "allow_items", "allow_prefixes", "deny_items", "deny_prefixes"),
    ("speculation", "speculation_trace", "someone_elses"),
)
"""Options that go with one another; the first makes the others count."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 5, 12, 0, -1, 10**9),
    "n": (1, 2, 8, 40, 0, 10**9),
    "temperature": (0.0, 0.7, 1.5, -1),
    "top_k": (0, 1, 5),
    "top_p": (0.5, 1.0),
    "min_p": (0.1,),
    "logprobs": (0, 1, 5, 20),
    "stop": ("a", ["e", " "], [""]),
    "min_tokens": (0, 3),
    "ignore_eos": (True, False),
    "allowed_token_ids": ([0], [5, 6, 7], [10**9], []),
    "logit_bias": ({"5": 10.0}, {"5": -100}, {"-1": 1}),
    "bad_words": (["a"], [""]),
    "repetition_penalty": (1.2, 0.5),
    "presence_penalty": (0.5,),
    "structured_outputs": ({"json": {"type": "boolean"}}, {"choice": ["yes", "no"]}, {}),
    "cache_salt": ("tenant", "sql\0", "", "\ud800"),
    "use_beam_search": (True, False),
    "echo": (True,),
    "prompt_logprobs": (1,),
}
"""Fields of OpenAI's and vLLM's, which meet the options."""


def values_of_size(size: int) -> dict[str, Any]:
    """Return values of about as many bytes of JSON, by what they are."""
    keys = [f"key{i}" for i in range(size // 14)]
    random.Random(size).shuffle(keys)
    lists: list[Any] = [[7] * 20] * (size // 60)
    while len(lists) > 20:
        lists = [lists[i : i + 20] for i in range(0, len(lists), 20)]
    return {
        "string": "x" * size,
        "integers": [7] * (size // 3),
        "strings": ["ab"] * (size // 6),
        "numbers": [0.5] * (size // 5),
        "integers and strings": [1, "a"] * (size // 8),
        "lists in lists": lists,
        "object": dict.fromkeys(keys, 1),
        "integers as JSON": f"[{'1,' * (size // 2)}1]",
        "wrong prefixes as JSON": "[" + f"[{'-1,' * 20}-1]," * (size // 65) + "[-1]]",
        "open lists as JSON": "[" * size,
    }


def large_requests(size: int, num: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield descriptions and requests of about as many bytes, `num` of each option and key."""
    rng = random.Random(size)
    leaders: tuple[dict[str, Any], ...] = (
        *({}, {"beam_width": 4}, {"items": "integers"}, {"beam_width": 4, "items": "integers"}),
    )
    values = values_of_size(size)
    entries = {
        f"{option} of {kind}": {option: value}
        for option in (*OPTIONS, "prediction")
        for kind, value in rng.sample([*values.items()], num)
    }
    for prefix in ("option", "beam_wid", "k" * 900):
        num_keys = 1 + size // (len(prefix) + 10)
        entries[f"{num_keys} keys {prefix[:9]}"] = {f"{prefix}{i}": 1 for i in range(num_keys)}
    for number, (label, added) in enumerate(entries.items()):
        request: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.0}
        leader = rng.choice(leaders)
        label += f" with {' and '.join(leader) or 'nothing'}"
        if number % 3:
            yield label, {**request, "vllm_xargs": {**leader, **added}}
        else:
            yield f"{label}, fields", {**request, **added, "vllm_xargs": leader}


def longest_waits(server: Server, size: int, num: int) -> dict[str, float]:
    """Return the longest wait of `/health`, in seconds, during each of the large requests."""
    waits: dict[str, float] = {}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=server.url, trust_env=False, timeout=120.0) as other_client,
    ):
        for label, request in large_requests(size, num):
            body = json.dumps({"model": MODEL_NAME, **request})
            sending, waits[label] = pool.submit(post, server, body), 0.0
            while not sending.done():
                start = time.perf_counter()
                assert other_client.get("/health").status_code == 200
                waits[label] = max(waits[label], time.perf_counter() - start)
            answer = sending.result()
            assert answer.status_code < 500, f"{label}: {answer.text[:500]}"
    return waits


NEIGHBOUR = {"prompt": "def fibonacci(n):", "temperature": 0.0, "max_tokens": 24}
BEAMS = {**NEIGHBOUR, "n": 4, "vllm_xargs": {"beam_width": 4}}
SEARCH = {
    **{"prompt": [1, 2, 3], "n": 4, "temperature": 0.0, "max_tokens": 4},
    "vllm_xargs": {"beam_width": 4, "items": "integers"},
}


@dataclass
class Figures:
    """What came of an attack."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    options: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    """Neighbours with other answers than alone."""
    failed: list[str] = field(default_factory=list)
    """Requests that were answered with a status of 500 or more."""
    longest_s: float = 0.0
    """Of a neighbour's request."""

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {len(self.options)} options, answers by status "
            f"{dict(sorted(self.statuses.items()))}, {len(self.wrong)} wrong answers, "
            f"{len(self.failed)} of 500 or more, longest neighbour {self.longest_s:.2f} s"
        )


def post(server: Server, body: str, timeout_s: float = 120.0) -> httpx.Response:
    """Send a completion request."""
    headers = {"content-type": "application/json"}
    return server.http.post("/v1/completions", content=body, headers=headers, timeout=timeout_s)


def hostile_request(rng: random.Random) -> dict[str, Any]:
    """Return a request with some options, right ones more often than not."""
    first, *others = rng.choice(TOGETHER)
    names = [first, *rng.sample(others, rng.randint(0, len(others)))]
    if "items" in others:
        names.append("items")
    if rng.random() < 0.15:
        names.append(rng.choice([*OPTIONS]))
    extra_args = {name: rng.choice(OPTIONS[name]) for name in names}
    if rng.random() < 0.3:
        name = rng.choice(sorted(option_names().keys() | {"speculation", "speculation_trace"}))
        extra_args[name] = rng.choice(ABSURD)
    request: dict[str, Any] = {
        "prompt": [rng.randint(1, 2000) for _ in range(rng.choice([1, 9, 60]))],
        "max_tokens": rng.choice([5, 12]),
        "temperature": 0.7 if extra_args.get("do_sample") else 0.0,
        "vllm_xargs": extra_args,
    }
    for name in rng.sample([*FIELDS], rng.choice([0, 0, 0, 1, 2])):
        request[name] = rng.choice(FIELDS[name])
    return request


def attack(server: Server, num_requests: int, seed: int) -> Figures:
    """Send hostile requests, eight at a time, and neighbours whose answers are known."""
    rng, neighbours = random.Random(seed), (NEIGHBOUR, SEARCH, BEAMS)
    figures = Figures()

    def send(request: Mapping[str, Any], timeout_s: float = 120.0) -> httpx.Response:
        body = json.dumps({"model": MODEL_NAME, **request})  # httpx encodes no half surrogates
        return post(server, body, timeout_s)

    def answer_of(response: httpx.Response) -> list[str]:
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]

    expected = [answer_of(send(neighbour)) for neighbour in neighbours]

    def run(number: int, request: dict[str, Any]) -> None:
        if number % 4 == 0:
            which = number // 4 % len(neighbours)
            start = time.perf_counter()
            answer = answer_of(send(neighbours[which]))
            figures.longest_s = max(figures.longest_s, time.perf_counter() - start)
            if answer != expected[which]:
                figures.wrong.append(f"{answer} instead of {expected[which]}")
            return
        try:
            # Some clients leave before the answer.
            response = send(request, 0.02) if number % 9 == 0 else send(request)
        except httpx.ReadTimeout:
            figures.statuses[0] += 1
            return
        figures.statuses[response.status_code] += 1
        if response.status_code >= 500:
            figures.failed.append(f"{json.dumps(request)[:600]} -> {response.text[:300]}")

    requests = [hostile_request(rng) for _ in range(num_requests)]
    for request in requests:
        figures.options |= request["vllm_xargs"].keys() | request.keys() & FIELDS.keys()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(num_requests), requests))
    figures.requests = num_requests
    for neighbour, answer in zip(neighbours, expected, strict=True):
        if answer_of(send(neighbour)) != answer:
            figures.wrong.append("a neighbour after the attack")
    return figures


def server_options(folder: Path) -> list[str]:
    """Return the options of a server with all that requests can ask for, which is attacked.

    Args:
        folder: Gets what the server needs and keeps, traces in `traces`.
    """
    catalogues = {
        "integers": str(write(folder / "integers.trie", INTEGERS)),
        "texts": str(write(folder / "texts.trie", TEXTS, text_ids=True, weights=True)),
        "mixed": str(write(folder / "mixed.trie", MIXED)),
    }
    (folder / "traces").mkdir()
    (folder / "store").mkdir()
    speculation = {
        **{"num_speculative_tokens": 16, "trace_path": str(folder / "traces")},
        **{"store_path": str(folder / "store"), "recycle": True, "node_budget": "fixed"},
    }
    return [
        *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--max-num-seqs", "32"),
        *("--additional-config", json.dumps({"vllm_trie": {"items": catalogues}})),
        "--enable-scale-out",
        *("--spec-method", "ngram_trie", "--speculative-config", json.dumps(speculation)),
    ]


def main() -> None:
    """Attack a server, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    with running(folder / "log", *server_options(folder)) as server:
        figures = attack(server, arguments.requests, arguments.seed)
        print(f"{figures}; alive: {server.is_healthy()}")
        for failed in Counter(text.split(" -> ")[1] for text in figures.failed).most_common():
            print("  ", failed)
        for text in [*figures.failed[:20], *figures.wrong[:5]]:
            print("  ", text)
        if not server.is_healthy():
            print(server.log_text()[-6000:])
    print(f"logs in {folder}")


if __name__ == "__main__":
    main()
