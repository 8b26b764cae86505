"""Beam requests in an engine that speculates with token trees: no drafts for beams, all correct."""

from __future__ import annotations

from tests.engine.beam import test_token_rules as token_rules
from tests.engine.beam.cases import check_case, few_cases, request_of
from tests.engine.beam.test_token_rules import RULES
from tests.engine.compare import preemptions
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())
SPECULATION = {"method": "ngram_trie", "num_speculative_tokens": 8}
OPTIONS = {
    "block_size": 32, "max_model_len": 512, "max_num_seqs": 32, "num_gpu_blocks_override": 17
}  # fmt: skip


def test_beams_get_no_drafts_and_others_keep_theirs(engine):
    from vllm import SamplingParams

    llm = engine(speculative_config=SPECULATION, **OPTIONS)
    scheduler = scheduler_of(llm)
    drafted: dict[str, int] = {}
    schedule = scheduler.schedule

    def watch(*args):
        output = schedule(*args)
        for request_id in scheduler.requests:
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            drafted[request_id] = drafted.get(request_id, 0) + len(drafts)
        return output

    scheduler.schedule = watch
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        repetitive = [{"prompt_token_ids": [11, 12, 13, 14, 15 + i] * 12} for i in range(6)]
        alone = [
            list(llm.generate([text], greedy, use_tqdm=False)[0].outputs[0].token_ids)
            for text in repetitive
        ]
        drafted.clear()
        cases = few_cases()
        requests = [(text, greedy) for text in repetitive] + [request_of(case) for case in cases]
        requests += [token_rules.request_of(number, rule) for number, rule in enumerate(RULES)]
        with preemptions(llm) as preempted:
            results = llm.generate(
                [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
            )
        assert preempted
    finally:
        del scheduler.schedule
    assert [list(result.outputs[0].token_ids) for result in results[:6]] == alone
    for case, result in zip(cases, results[6 : 6 + len(cases)], strict=True):
        check_case(SHIPPED, case, result)
    for number, result in enumerate(results[6 + len(cases) :]):
        hypotheses = [hypothesis.token_ids for hypothesis in token_rules.expected(number)]
        assert [list(output.token_ids) for output in result.outputs][
            : len(hypotheses)
        ] == hypotheses
    proxies = [count for request_id, count in drafted.items() if "~" in request_id]
    others = [count for request_id, count in drafted.items() if "~" not in request_id]
    assert proxies
    assert not any(proxies)
    assert any(others)
