"""Beam search and GPUs: off unless the user allows it, and what of it a CPU can run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.beam.cases import prompt
from tests.engine.beam.test_entrances import beam_params
from tests.engine.conftest import needs_triton, scheduler_of
from tests.newer_vllm import newer_vllm
from tests.processes import run_program
from vllm_trie.vllm_hooks.setup import limits


def test_vllms_own_search_serves_where_the_native_one_is_untested(engine, monkeypatch) -> None:
    from vllm.sampling_params import BeamSearchParams

    options = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 8}
    source = [{"prompt_token_ids": list(prompt(2, 40))}]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    stock = engine(additional_config={"vllm_trie": {"beam_search": False}}, **options)
    expected = stock.beam_search(source, params)
    untested = limits.Limit(limits.BEAMS, "", lambda config: True, "never run on a GPU")
    monkeypatch.setattr(limits, "LIMITS", (untested, *limits.LIMITS))
    # Its own engine: the scheduler learns of it when it is made.
    elsewhere = engine(additional_config={"for": "this test"}, **options)
    searched = elsewhere.beam_search(source, params)
    assert [(sequence.tokens, sequence.cum_logprob) for sequence in searched[0].sequences] == [
        (sequence.tokens, sequence.cum_logprob) for sequence in expected[0].sequences
    ]
    assert scheduler_of(elsewhere).beam_counters.groups == 0
    with pytest.raises(ValueError, match=r"native beam search is off: never run on a GPU"):
        elsewhere.generate(source, beam_params(3), use_tqdm=False)


def test_the_server_hands_searches_and_their_streams_to_vllm(monkeypatch) -> None:
    """Streams too: vLLM's own search takes them where it can."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    from vllm_trie.vllm_hooks.frontend import beam_api
    from vllm_trie.vllm_hooks.ledger import install

    install("beam")
    reason: list[str | None] = ["never run on a GPU"]
    monkeypatch.setattr(beam_api, "reason_for_stock_search", lambda *arguments: reason[0])
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], use_beam_search=True, n=2, stream=True
    )
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=None))
    params = request.to_beam_search_params(8, {})
    arguments: Any = (serving, {"type": "token"}, "id", params, None, None, None)
    assert beam_api.search_online(*arguments) is None
    reason[0] = None
    with pytest.raises(VLLMValidationError, match="stream=true is not supported"):
        beam_api.search_online(*arguments)


# -- the classes of a GPU's engine -----------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpus_runners() -> dict[str, Any]:
    return run_program("tests.engine.beam.gpu_runners_run")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "default",
        "rules and catalogues",
        "no prefix caching, synchronous",
        "beside chains",
        "beside trees",
        "V1",
    ],
)
def test_hypotheses_are_those_of_transformers_on_a_gpus_runner(
    on_gpus_runners: dict[str, Any], case: str
) -> None:
    check(case, on_gpus_runners[case])


@needs_triton
@pytest.mark.slow
def test_searches_and_their_check_on_the_newer_vllm() -> None:
    case = "rules and catalogues"
    check(case, run_program("tests.engine.beam.gpu_runners_run", case, **newer_vllm())[case])


def check(case: str, result: dict[str, Any]) -> None:
    assert result["compared"] >= 20
    assert result["beams_forked"] > 20
    if case == "rules and catalogues":  # whose check searches ahead, too
        assert result["start"][:2] == [None, True]
        assert "differ by" in result["start"][2]
        assert result["start"][3] == "RuntimeError: a fault of the device"
    assert result["groups_failed"] == result["blocks_lost"] == result["requests_left"] == 0
    if case in ("default", "beside chains", "beside trees", "V1"):  # whose groups fight for blocks
        assert result["beams_preempted"] > 0
    if case in ("default", "rules and catalogues", "beside chains", "beside trees"):
        # On V2, asynchronously, nobody waits but who fetches an output, once, and who drafts.
        waits = result["waits"]
        assert waits["step"][:2] == [0, int(case.startswith("beside"))], waits
        assert waits["output"][:2] == [1, 1], waits
        assert waits["output"][2] > 50, waits
