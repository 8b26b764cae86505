"""N-best lists with scores, as in translation: beam search inside vLLM's scheduler.

    python examples/beam_nbest.py [--model PATH]

The hypotheses of a search are the branches of one trie and share their KV blocks. Scores are those
of Hugging Face's `generate`: the sum of log-probabilities over length ** length_penalty.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

from vllm_trie.lab.tiny_model import model_path

# The shipped model knows only Python, so it translates descriptions into signatures.
SOURCES = (
    "Write a function `area(width, height)` that returns the area of a rectangle.",
    "Write a function that counts the words in a text.",
)
WIDTH, BEST, MAX_TOKENS = 8, 4, 24


def main(model: str) -> None:
    llm = LLM(  # every engine has beam search, nothing needs switching on
        model,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # starts faster; leave it out to serve
    )
    search = {"beam_width": WIDTH, "length_penalty": 0.6, "early_stopping": "never"}
    params = {
        "beam": SamplingParams(n=BEST, temperature=0.0, max_tokens=MAX_TOKENS, extra_args=search),
        # Groups of beams avoid each other's tokens, for a list with more variety.
        "diverse beam": SamplingParams(
            n=BEST,
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            extra_args={**search, "num_beam_groups": 4, "diversity_penalty": 2.0},
        ),
    }
    # Ordinary requests share batches with beams.
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": source}] for source in SOURCES for _ in range(3)]
    outputs = llm.chat(chats, [greedy, *params.values()] * len(SOURCES), use_tqdm=False)
    for index, source in enumerate(SOURCES):
        plain, *lists = outputs[3 * index : 3 * index + 3]
        print(f"\n=== {source}\ngreedy    {plain.outputs[0].text!r}")
        for name, output in zip(params, lists, strict=True):
            print(f"{name}, width {WIDTH}:")
            for rank, hypothesis in enumerate(output.outputs, 1):  # best first
                print(
                    f"  {rank}. score {hypothesis.score:8.4f}"
                    f"   log p {hypothesis.cumulative_logprob:9.4f}"
                    f"   {len(hypothesis.token_ids):3} tokens   {hypothesis.text!r}"
                )

    # vLLM's own call keeps its options and its result, and runs the native search.
    (result,) = llm.beam_search(
        [{"prompt": "def area(width, height):"}],
        BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS),
    )
    print("\n=== LLM.beam_search")
    for rank, sequence in enumerate(result.sequences, 1):
        print(f"  {rank}. log p {sequence.cum_logprob:9.4f}   {sequence.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    main(parser.parse_args().model)
