"""vLLM engines in this process, for the demo, the validation and the benchmarks.

Importing this module imports neither torch nor vLLM: `set_environment` has to come before them.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import typer

from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_trie.drafts.engine.tree_step import TreeStep

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")

ENVIRONMENT = {
    # Puts the model runner, and with it the trees of each step, within reach.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The shipped model is too small to gain from more threads.
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait slow a busy machine down many times.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults of environment variables that torch and vLLM read when they are imported."""

_WITHOUT_MEMORY: dict[str, dict[str, Any]] = {
    "ngram_trie": {"store_tokens": 0},
    "trie_union": {"options": {"ngram_trie": {"store_tokens": 0}}},
    "suffix": {"suffix_decoding_max_cached_requests": 0},
}
NGRAM: dict[str, Any] = {
    "num_speculative_tokens": 8,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 5,
}
"""Options of vLLM's `ngram` and `ngram_gpu` where they are compared."""
_EXTRA_SLOTS = 16  # vLLM reserves a few


def with_all_cores() -> dict[str, str]:
    """Return the defaults for a model of real size, whose steps gain from all cores."""
    return ENVIRONMENT | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def set_environment(verbose: bool, defaults: Mapping[str, str] = ENVIRONMENT) -> None:
    """Set the variables that the user has not set; call it before importing torch or vLLM."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # numba, which vLLM's ngram method uses, sets OpenMP's number of threads for all engines.
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def silence(active: bool = True) -> Iterator[None]:
    """Keep the output of native code, progress bars and loggers off the terminal.

    If the block raises, everything held back goes to the standard error stream.
    """
    if not active:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failed = True
        try:
            os.dup2(held.fileno(), 1)
            os.dup2(held.fileno(), 2)
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            if failed:
                held.seek(0)
                sys.stderr.write(held.read().decode(errors="replace"))


def without_memory(method: str) -> dict[str, Any]:
    """Return the options with which a method forgets finished requests; see :func:`new_salts`, too.

    Measurements repeat the same prompts. A drafter that remembers earlier answers would look better
    than it is.
    """
    return _WITHOUT_MEMORY.get(method, {})


def new_salts(prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return a cache salt for each prompt, with which no drafter and no prefix cache knows it.

    It is the same for all prompts of a call, but for those that come again.
    """
    call, occurrences = time.perf_counter_ns(), Counter[tuple[int, ...]]()
    salts = []
    for prompt in map(tuple, prompts):
        salts.append(f"{call}-{occurrences[prompt]}")
        occurrences[prompt] += 1
    return salts


def inputs_of(
    prompts: Sequence[Sequence[int]], cache_salt: str | None = None
) -> list[TokensPrompt]:
    """Return vLLM's inputs, all with this cache salt or with new ones."""
    from vllm.inputs import TokensPrompt

    salts = new_salts(prompts) if cache_salt is None else [cache_salt] * len(prompts)
    return [
        TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt)
        for prompt, salt in zip(prompts, salts, strict=True)
    ]


def room_for(longest_prompt: int, max_tokens: int, num_nodes: int) -> int:
    """Return a `max_model_len` at which no request loses drafts to the length limit."""
    return longest_prompt + max_tokens + num_nodes + _EXTRA_SLOTS


def checked_length(
    model: str, prompts: Sequence[Sequence[int]], max_tokens: int, nodes: int
) -> int:
    """Return a `max_model_len` for these prompts, see :func:`room_for`.

    Raises:
        typer.BadParameter: The model has fewer positions.
    """
    length = room_for(max(map(len, prompts)), max_tokens, nodes)
    limit: int = text_config(model).max_position_embeddings
    if length > limit:
        raise typer.BadParameter(
            f"{max_tokens} new tokens, the longest prompt and {nodes} nodes need {length} "
            f"positions, and the model has {limit}; take at most "
            f"{max_tokens + limit - length} tokens",
            param_hint="--max-tokens",
        )
    return length


def start_engine(
    model: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    speculative_config: Mapping[str, object] | None = None,
    **options: object,
) -> LLM:
    """Start a `vllm.LLM` in this process; engines that are compared differ only in their method.

    `max_model_len` includes the nodes of a tree; `options` are further options of `vllm.LLM`.
    """
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": model,
        # In bfloat16 logits tie too often for an exact comparison.
        "dtype": "float32",
        # Compiling takes longer than the whole demo.
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "seed": 0,
        "disable_log_stats": True,
        **options,
    }
    if "kv_cache_memory_bytes" not in settings:
        cache_bytes = kv_cache_bytes(
            model, max_model_len, max_num_seqs, settings["dtype"], **loading_options(options)
        )
        settings["kv_cache_memory_bytes"] = cache_bytes
    if speculative_config is not None:
        settings["speculative_config"] = dict(speculative_config)
    return LLM(**settings)


@contextmanager
def engine(model: str, **settings: Any) -> Iterator[LLM]:
    """Start an engine as :func:`start_engine` does; free it at the end of the block."""
    llm = start_engine(model, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def loading_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return those of an engine's options with which Transformers must load its model, too."""
    names = "revision", "trust_remote_code"
    return {name: options[name] for name in names if name in options}


def kv_cache_bytes(
    model: str, max_model_len: int, max_num_seqs: int, dtype: str, **options: Any
) -> int:
    """Return the size of a KV cache for the largest batch of the longest sequences."""
    per_token = token_kv_bytes(model, 2 if dtype in ("bfloat16", "float16") else 4, **options)
    return max(64 << 20, int(1.25 * per_token * (max_model_len + 256) * (max_num_seqs + 1)))


def token_kv_bytes(model: str, itemsize: int, **options: Any) -> int:
    """Return the bytes of one token's keys and values in all layers, of `itemsize` each."""
    config = text_config(model, **options)
    num_layers: int = config.num_hidden_layers
    return 2 * itemsize * num_layers * prod(kv_shape(config))


def kv_shape(config: Any) -> tuple[int, int]:
    """Return the number of KV heads and their size, of a Hugging Face configuration."""
    num_heads: int = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return num_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // num_heads


def text_config(model: str, **options: Any) -> Any:
    """Return Hugging Face's configuration of the model's language part.

    Args:
        model: Its folder or name.
        options: Of `from_pretrained`.

    Raises:
        typer.BadParameter: There is none.
    """
    from transformers import AutoConfig

    with _errors_name_the_model(model, "cannot be loaded"):
        return AutoConfig.from_pretrained(model, **options).get_text_config()


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer from Transformers.

    Raises:
        typer.BadParameter: There is none.
    """
    from transformers import AutoTokenizer

    with _errors_name_the_model(model, "has no tokenizer that can be loaded"):
        return AutoTokenizer.from_pretrained(model)


@contextmanager
def _errors_name_the_model(model: str, problem: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(
            f"{model!r} {problem} ({reason}); give the folder of a Hugging Face model or a name on "
            "the hub",
            param_hint="--model",
        ) from None


def runner_of(llm: LLM) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: LLM) -> Any:
    """Return the scheduler of an engine in this process."""
    client: Any = llm.llm_engine.engine_core
    return client.engine_core.scheduler


def verifier_of(llm: LLM) -> Any | None:
    """Return the `TreeVerifier` of an engine in this process; None without draft trees."""
    runner = runner_of(llm)
    return getattr(getattr(runner, "adapter", None), "verifier", None)


def batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split `items` into batches of `size`; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    cache_salt: str | None = None,
) -> list[list[int]]:
    """Return the output tokens of each prompt, all in one batch; `cache_salt` as in
    :func:`decode_steps`."""
    outputs = llm.generate(inputs_of(prompts, cache_salt), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def interleave(
    runs: Mapping[Key, Callable[[], T]], repeats: int
) -> dict[Key, list[tuple[float, T]]]:
    """Time every run once, `repeats` times over, so that a slow minute affects all of them.

    The order is reversed in every other repeat.

    Returns:
        Seconds and result of each repeat, by the run's key.
    """
    timed: dict[Key, list[tuple[float, T]]] = {key: [] for key in runs}
    for repeat in range(repeats):
        for key in list(runs) if repeat % 2 == 0 else reversed(list(runs)):
            start = time.perf_counter()
            result = runs[key]()
            timed[key].append((time.perf_counter() - start, result))
    return timed


class RequestStep(NamedTuple):
    """The work of one engine step on one request."""

    prompt: int
    """Index of the request's prompt."""
    tokens: tuple[int, ...]
    """New output tokens. Text after a stop is cut off, so they may be fewer than were accepted."""
    tree: TokenTree
    """The draft tree that was verified; empty without a draft."""

    @property
    def accepted(self) -> tuple[int, ...]:
        """Indices of the nodes whose tokens are in the output, root first."""
        return tuple(self.tree.path_of(self.tokens))


def decode_steps(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    cache_salt: str | None = None,
) -> Iterator[list[RequestStep]]:
    """Decode one batch of prompts; yield the requests that got tokens after each engine step.

    The engine is one in this process, with or without draft trees. The parameters are those of all
    prompts, or of each. `cache_salt` separates what drafters and the prefix cache remember; without
    one no prompt is known.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine, empty = llm.llm_engine, TokenTree.empty()
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    inputs = zip(inputs_of(prompts, cache_salt), params, strict=True)
    for index, (prompt, request_params) in enumerate(inputs):
        request_params = request_params.clone()
        request_params.output_kind = RequestOutputKind.DELTA
        engine.add_request(f"prompt-{index}", prompt, request_params)
    with _trees_of_outputs(llm) as trees:
        while engine.has_unfinished_requests():
            steps = []
            for output in cast("list[RequestOutput]", engine.step()):
                index, tokens = int(output.request_id.split("-")[1]), output.outputs[0].token_ids
                steps.append(RequestStep(index, tuple(tokens), trees.get(output.request_id, empty)))
            yield steps


@contextmanager
def _trees_of_outputs(llm: LLM) -> Iterator[dict[str, TokenTree]]:
    """Keep the trees of the step whose outputs the engine returned last, by id of the request.

    With asynchronous scheduling the engine launches later steps before it returns them.
    """
    trees_of_outputs: dict[str, TokenTree] = {}
    verifier = verifier_of(llm)
    if verifier is None:
        yield trees_of_outputs
        return
    runner, scheduler = runner_of(llm), scheduler_of(llm)
    launch, take_in = runner.execute_model, scheduler.update_from_output
    launched: dict[int, TreeStep] = {}  # by the scheduler's output

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = launch(scheduled, *args, **kwargs)
        launched[id(scheduled)] = verifier.step
        return result

    def update_from_output(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        trees_of_outputs.clear()
        if step := launched.pop(id(scheduled), None):
            # vLLM appends a random part to each id.
            names = (request_id.rpartition("-")[0] for request_id in step.request_ids)
            trees_of_outputs.update(zip(names, step.trees, strict=True))
        return take_in(scheduled, *args, **kwargs)

    runner.execute_model, scheduler.update_from_output = execute_model, update_from_output
    try:
        yield trees_of_outputs
    finally:
        del runner.execute_model, scheduler.update_from_output
