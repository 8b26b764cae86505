"""Record generations with engines in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.extras.traces.trace_file import Header, Step, Trace, read_trace
from vllm_trie.lab.explore.page import Beams
from vllm_trie.lab.local_engine import decode_steps, generate, verifier_of
from vllm_trie.searches.trace import SearchTrace
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def record(
    llm: LLM, method: str, prompt: Sequence[int], params: SamplingParams, folder: Path
) -> Trace:
    """Decode one prompt and return its trace.

    Args:
        llm: An engine in this process; one with drafts writes traces to `folder`.
        method: Its name for the page.
        prompt: Token ids.
        params: vLLM's sampling parameters.
        folder: Empty before and after.
    """
    if verifier_of(llm) is None:
        return _without_drafts(llm, method, prompt, params)
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), "speculation_trace": True}
    generate(llm, [prompt], params)
    (path,) = folder.iterdir()
    trace = read_trace(path)
    path.unlink()
    # The worker hears of the request's end with the next request.
    end = "complete" if trace.end == "missing" else trace.end
    return trace._replace(header=trace.header.model_copy(update={"request_id": ""}), end=end)


def _without_drafts(llm: LLM, method: str, prompt: Sequence[int], params: SamplingParams) -> Trace:
    model, none = llm.llm_engine.model_config, TokenTree.empty()
    steps: list[Step] = []
    last = time.perf_counter()
    for batch in decode_steps(llm, [prompt], params):
        now = time.perf_counter()
        for step in batch:
            if step.tokens:
                steps.append(Step.of(none, (), step.tokens, now - last))
                last = now
    header = Header.of("", method, model.model, model.tokenizer, prompt)
    return Trace(header, steps, "complete")


def record_beams(llm: LLM, beam_width: int, prompt: Sequence[int], max_tokens: int) -> Beams:
    """Search one prompt and return what there is to draw.

    Raises:
        RuntimeError: Native beam search is off.
    """
    from vllm import SamplingParams

    options = {"beam_width": beam_width, "beam_trace": True}
    params = SamplingParams(
        n=beam_width, temperature=0.0, max_tokens=max_tokens, extra_args=options
    )
    (result,) = llm.generate([list(prompt)], params, use_tqdm=False)
    output = result.outputs[0]
    if not hasattr(output, "beam"):
        raise RuntimeError("native beam search is off; see `vllm-trie doctor`")
    search = SearchTrace(**output.beam["trace"])
    return Beams(search, len(prompt), llm.llm_engine.vllm_config.cache_config.block_size)
