"""Stop strings inside a search: a hypothesis ends where its text contains one."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_trie.searches.search import StopStringFinder

# Tokens of a byte-level vocabulary that one character can take.
_MAX_TOKENS_PER_CHARACTER = 4


def make_stop_string_finder(
    model_config: ModelConfig, params: SamplingParams
) -> StopStringFinder | None:
    """Return a function that finds the stop string that the last token completes.

    None if the request has no stop strings.

    Raises:
        ValueError: It has some, and the engine has no tokenizer.
    """
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    if not stops:
        return None
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise ValueError("beam search: stop strings need a tokenizer; unset skip_tokenizer_init")
    window = _MAX_TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    skip = params.skip_special_tokens

    def find(token_ids: list[int]) -> str | None:
        tail = token_ids[-window:]
        text = tokenizer.decode(tail, skip_special_tokens=skip)
        if not (present := [stop for stop in stops if stop in text]):
            return None
        before = len(tokenizer.decode(tail[:-1], skip_special_tokens=skip).rstrip("\ufffd"))
        for stop in present:
            # At least one of its characters is new; earlier tokens were checked before.
            if text.find(stop, max(0, before - len(stop) + 1)) >= 0:
                return stop
        return None

    return find
