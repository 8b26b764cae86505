"""Record generations with engines in this process."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

from vllm_trie.beam.trace import SearchTrace
from vllm_trie.explore.page import Beams
from vllm_trie.explore.trace import Header, Step, Trace, TraceWriter, parse_trace
from vllm_trie.local_engine import decode_steps


def record(llm: Any, method: str, prompt: Sequence[int], params: Any) -> Trace:
    """Decode one prompt and return its trace.

    Args:
        llm: an engine in this process, with or without draft trees.
        method: its name for the page.
        prompt: token ids.
        params: vLLM's sampling parameters.
    """
    model = llm.llm_engine.model_config
    buffer = io.BytesIO()
    writer = TraceWriter(buffer, Header.of("", method, model.model, model.tokenizer, prompt))
    last = time.perf_counter()
    for steps in decode_steps(llm, [prompt], params):
        now = time.perf_counter()
        for step in steps:
            if step.tokens:
                writer.add(Step.of(step.tree, step.accepted, step.tokens, now - last))
                last = now
    writer.finish()
    return parse_trace(buffer.getvalue().splitlines(keepends=True), method)


def record_beams(llm: Any, beam_width: int, prompt: Sequence[int], max_tokens: int) -> Beams:
    """Search one prompt and return what there is to draw.

    Raises:
        RuntimeError: native beam search is off.
    """
    from vllm import SamplingParams

    options = {"beam_width": beam_width, "beam_trace": True}
    params = SamplingParams(
        n=beam_width, temperature=0.0, max_tokens=max_tokens, extra_args=options
    )
    (result,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    output = result.outputs[0]
    if not hasattr(output, "beam"):
        raise RuntimeError("native beam search is off; see `vllm-trie doctor`")
    search = SearchTrace.from_dict(output.beam["trace"])
    return Beams(search, len(prompt), llm.llm_engine.vllm_config.cache_config.block_size)
