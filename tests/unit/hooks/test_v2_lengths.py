"""Steps of Model Runner V2 cut to what was drafted."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from vllm_trie.drafts.engine.runners import v2_lengths


def step(**num_tokens: int) -> SchedulerOutput:
    """A step with places for four draft tokens in requests with five tokens."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = num_tokens
    output.total_num_scheduled_tokens = sum(num_tokens.values())
    output.scheduled_spec_decode_tokens = {
        name: [-1] * 4 for name, number in num_tokens.items() if number == 5
    }
    return output


@pytest.mark.parametrize("length", range(2, 9))
def test_decodes_are_sorted_before_prompts(length):
    """vLLM takes the recurrent states of requests behind a prompt for states of prompts."""
    scheduled = step(a=5, b=5)
    scheduled.num_scheduled_tokens["prompt"] = length
    is_full = v2_lengths.has_prompt_like_decode(scheduled, 4)
    drafted = {"a": 0, "b": 3}
    output = v2_lengths.cut(scheduled, drafted, None if is_full else ()).output
    tokens = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    assert sort_batch_req_ids(*tokens, decode_query_len=5)[-1] == "prompt"


def test_masks_follow_their_places():
    rows = np.arange(8)[:, None]
    grammar = GrammarOutput(["b", "prefill", "a"], rows, [2, 0, 4])
    step = SchedulerOutput.make_empty()
    cut = v2_lengths.CutStep(step, {"a": 3, "b": 2, "c": 3}, {"a": 1, "b": 0, "c": 3}).masks(
        grammar
    )
    # Rows 0 to 2 are those of b, row 3 that of the prefill, 4 to 7 those of a.
    assert cut.grammar_bitmask[:, 0].tolist() == [0, 3, 4, 5]
    assert cut.structured_output_request_ids == grammar.structured_output_request_ids
