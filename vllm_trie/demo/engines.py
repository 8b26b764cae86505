"""Engines inside this process, started quietly and with equal settings."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    # The engine's objects must be within reach: the demo looks at the trees of each step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The shipped model is so small that more threads cost more than they bring.
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait slow a busy machine down many times.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults of environment variables that are read when torch or vLLM is imported."""

_EXTRA_SLOTS = 16  # vLLM keeps a few for itself


def set_environment(verbose: bool, defaults: Mapping[str, str] = ENVIRONMENT) -> None:
    """Set what the user has not set; must run before torch and vLLM are imported."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # vLLM's ngram method uses numba, which would set OpenMP's number of threads for all engines.
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def silence(active: bool = True) -> Iterator[None]:
    """Keep what native code, progress bars and loggers print off the terminal.

    If the block fails, everything that was held back is printed to the standard error stream.
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


_WITHOUT_MEMORY: dict[str, dict[str, Any]] = {
    "ngram_trie": {"store_tokens": 0},
    "trie_union": {"options": {"ngram_trie": {"store_tokens": 0}}},
    "suffix": {"suffix_decoding_max_cached_requests": 0},
}


def without_memory(method: str) -> dict[str, Any]:
    """Options with which a method remembers no finished requests.

    Measurements run the same prompts again and again; a drafter that remembers the answers of the
    last time would look better than it is.
    """
    return _WITHOUT_MEMORY.get(method, {})


def start_engine(
    model: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    speculative_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A vLLM engine in this process; all engines that are compared differ in their method only.

    Args:
        model: folder or name of the model.
        max_model_len: length limit of a sequence; room for the nodes of its tree is added.
        max_num_seqs: largest batch.
        speculative_config: vLLM's option, None for plain decoding.
        options: further options of `vllm.LLM`.
    """
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": model,
        # Exact comparisons need it: bfloat16 logits tie too often.
        "dtype": "float32",
        # Compiling takes longer than the whole demo.
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_bytes(model, max_model_len, max_num_seqs),
        "seed": 0,
        "disable_log_stats": True,
        **options,
    }
    if speculative_config is not None:
        settings["speculative_config"] = dict(speculative_config)
    return LLM(**settings)


def kv_cache_bytes(model: str, max_model_len: int, max_num_seqs: int) -> int:
    """Bytes of a float32 KV cache in which the largest batch of longest sequences fits."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    per_token = 2 * config.num_hidden_layers * heads * head_size * 4
    return max(64 << 20, int(1.25 * per_token * (max_model_len + 256) * (max_num_seqs + 1)))


def text_config(model: str) -> Any:
    """Hugging Face's configuration of the model's language part."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()


def room_for(longest_prompt: int, max_tokens: int, num_nodes: int) -> int:
    """A `max_model_len` at which no request loses drafts to the length limit."""
    return longest_prompt + max_tokens + num_nodes + _EXTRA_SLOTS


def runner_of(llm: Any) -> Any:
    """The model runner of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def num_parameters(model: str) -> int | None:
    """Number of weights in the files of a model folder, None if it holds no safetensors.

    The engine is no help: vLLM packs weights for the CPU's kernels and drops the originals.
    """
    from safetensors import safe_open

    total = 0
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
            total += sum(prod(weights.get_slice(name).get_shape()) for name in names)
    return total or None
