"""Drafts on a release of vLLM that the ledger does not list, before an engine serves.

All symbols are there, and may mean something else. A few prompts therefore run through the whole
engine, on both model runners: without drafts, and with drafts that are right but for some. An
engine whose drafts raise, are never accepted, or change what a draft must not change, serves
without them. One that cannot decode without drafts either does not start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.scheduler.grammar_time import TimedGrammar
from vllm_trie.extras.device_checks.engine_steps import (
    drop_requests,
    keep_serving,
    leave,
    outputs_of,
)
from vllm_trie.extras.device_checks.start_check import (
    EVEN,
    GRAMMAR,
    NUM_TOKENS,
    ODD,
    PROMPT_LENGTH,
    TEMPERATURE,
    Decoded,
    KnownAnswers,
    Prompt,
    answers_by_prompt,
    margins_of,
    near_tie,
    random_prompt,
    wrong_token,
)
from vllm_trie.hooks import ledger, plugin
from vllm_trie.hooks.ledger.record import TESTED, Symbols
from vllm_trie.hooks.wire import SPECULATION, STATS_ATTRIBUTE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

    from vllm_trie.drafts.engine.verifier import TreeVerifier

logger = init_logger(f"vllm.{__name__}")


@Symbols("v1.engine.core:", TESTED).wraps(
    "EngineCore.__init__", "checks drafts before it serves, on a release that is not listed"
)
def engine_core_init(
    original: Callable[..., None], self: EngineCore, *args: object, **kwargs: object
) -> None:
    original(self, *args, **kwargs)
    if ledger.is_unlisted():
        check_release(self)


def check_release(core: EngineCore) -> None:
    """Have an engine serve without drafts if they fail, and without the plugin if it must, and say
    which way it went.

    Raises:
        RuntimeError: An engine that was to draft does not decode without drafts either.
    """
    unlisted = (
        f"vLLM {vllm.__version__} is none of the releases that vllm-trie was written for "
        f"({plugin.supported()})"
    )
    start = time.perf_counter()
    what = "requests without drafts"
    drafts = config.read(core.vllm_config) is not None
    if not _can_check(core.vllm_config):
        if drafts:
            raise RuntimeError(
                f"{unlisted}, and drafts cannot be checked with data parallelism; leave the "
                "speculative method out, or install one of these releases or a newer vllm-trie"
            )
        return leave(core, f"{unlisted}, and nothing can check this engine")
    if not drafts:
        passed = keep_serving(core, f"{unlisted}, and an ordinary request failed")
    else:
        what = "drafts"
        try:
            passed = _keep_drafting(core)
        except Exception as error:
            raise RuntimeError(
                f"{unlisted}, and requests without drafts fail: {type(error).__name__}: {error}. "
                "Leave the speculative method out, or install one of these releases or a newer "
                "vllm-trie"
            ) from error
    if passed:
        seconds = time.perf_counter() - start
        logger.info(
            "%s. Its hooks fit, and %s passed their check in %.1f s", unlisted, what, seconds
        )


def _keep_drafting(core: EngineCore) -> bool:
    """Switch an engine's drafts off if they fail; return whether they do not."""
    check = _Check(core)
    plain = check.decoded()
    why = check.reason_against_drafts(plain)
    if why is not None and (difference := check.difference(plain, check.decoded())) is not None:
        raise RuntimeError(difference)
    core.collective_rpc(_forget, args=(why,))
    setattr(core.scheduler, STATS_ATTRIBUTE, None)
    return why is None


def _can_check(vllm_config: VllmConfig) -> bool:
    """Return whether prompts of tokens can run through an engine on its own."""
    model = vllm_config.model_config
    return (
        model.runner_type == "generate"
        and not model.is_encoder_decoder
        and vllm_config.parallel_config.data_parallel_size == 1
    )


class _Check:
    """Prompts, and what an engine makes of them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        model = core.vllm_config.model_config
        self._vocab_size = model.get_vocab_size()
        dtype: Any = model.dtype  # no name any more
        self._allowed = near_tie(dtype)
        self._ids = (f"_vllm_trie_release_{number}" for number in itertools.count())
        room = model.max_model_len - 1
        length = max(1, min(PROMPT_LENGTH, room // 3))
        self._num_tokens = min(NUM_TOKENS, room - length)
        block_size: int = core.scheduler.block_size  # type: ignore[attr-defined]
        long = max(length, min(2 * block_size + 3, room - self._num_tokens))
        prompt = partial(
            random_prompt,
            vocab_size=self._vocab_size,
            max_tokens=self._num_tokens,
            detokenize=False,
        )
        self.prompts = [
            prompt(0, length),
            prompt(1, length, temperature=TEMPERATURE, seed=1),
            prompt(2, length, has_grammar=True, structured_outputs=GRAMMAR),
            prompt(3, long),
        ]

    def reason_against_drafts(self, plain: Decoded) -> str | None:
        """Return what speaks against drafts, None if nothing does; leave the drafters as they
        were."""
        answers = answers_by_prompt(self.prompts, plain)
        self._core.collective_rpc(_begin_answers, args=(answers,))
        try:
            drafted = self.decoded(with_drafts=True)
        except Exception as error:
            logger.exception("The check of drafts failed")
            drop_requests(self._core)
            return f"{type(error).__name__}: {error}"
        finally:
            self._core.collective_rpc(_end_answers)
        if drafted.tokens_per_step <= 1 < self._num_tokens - 1:
            return "drafts of the right tokens were not accepted"
        return self.difference(plain, drafted)

    def difference(self, expected: Decoded, decoded: Decoded) -> str | None:
        """Return what a second run must not change, None if it has not."""
        return wrong_token(self.prompts, expected, decoded, self._allowed)

    def decoded(self, with_drafts: bool = False) -> Decoded:
        """Decode all prompts."""
        requests = [self._request(prompt, with_drafts) for prompt in self.prompts]
        try:
            with _stand_in_for_grammars(self._core.structured_output_manager, self._vocab_size):
                outputs = outputs_of(self._core, requests)
        finally:
            self._core.reset_prefix_cache()
        tokens = [[t for o in of_request for t in o.new_token_ids] for of_request in outputs]
        likeliest = [
            [
                margins_of(*row)
                for output in of_request
                if (logprobs := output.new_logprobs) is not None
                for row in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True)
            ]
            for of_request in outputs
        ]
        # Of the first: what a grammar forces is drafted without the drafter.
        return Decoded(tokens, likeliest, 0.0, len(tokens[0]) / len(outputs[0]))

    def _request(self, prompt: Prompt, with_drafts: bool) -> Request:
        params = prompt.params.clone()
        params.extra_args = None if with_drafts else {SPECULATION: False}
        hasher = self._core.request_block_hasher
        request = Request(next(self._ids), prompt.token_ids, params, None, block_hasher=hasher)
        if (structured := request.structured_output_request) is not None:
            structured.grammar = TimedGrammar(_EvenAndOdd())
            structured.reasoning_ended = True
        return request


class _EvenAndOdd(StructuredOutputGrammar):
    """Allows even and odd tokens by turns."""

    def __init__(self) -> None:
        self._place = 0

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        places = itertools.count(self._place)
        return [*takewhile(lambda token: (token - next(places)) % 2 == 0, tokens)]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        is_valid = self.validate_tokens(tokens) == tokens
        self._place += len(tokens) * is_valid
        return is_valid

    def rollback(self, num_tokens: int) -> None:
        self._place -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index].fill_(int((EVEN, ODD)[self._place % 2]))

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self._place = 0


@contextmanager
def _stand_in_for_grammars(manager: Any, vocab_size: int) -> Iterator[None]:
    """Give a manager what allocates masks. vLLM makes its own with the first request, whose
    options choose it."""
    stock = manager.backend, manager._grammar_bitmask
    width = -(-vocab_size // 32)
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.full((rows, width), -1, dtype=torch.int32)
    )
    manager._grammar_bitmask = None
    try:
        yield
    finally:
        manager.backend, manager._grammar_bitmask = stock


# -- on each rank ----------------------------------------------------------------------------------


class _Answers(KnownAnswers):
    """Drafts known answers in place of a rank's drafter."""

    def __init__(self, verifier: TreeVerifier, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(verifier.guard.drafter.context, answers)
        self.stands_for = verifier.guard.drafter, verifier.budget, verifier.observers


def _begin_answers(worker: Any, answers: Mapping[tuple[int, ...], list[int]]) -> None:
    """Draft known answers."""
    if (adapter := worker.adapter) is not None:
        verifier = adapter.verifier
        verifier.guard.drafter = _Answers(verifier, dict(answers))
        verifier.budget, verifier.observers = None, ()


def _end_answers(worker: Any) -> None:
    """Draft as before."""
    if (adapter := worker.adapter) is not None:
        verifier = adapter.verifier
        verifier.guard.drafter, verifier.budget, verifier.observers = (
            verifier.guard.drafter.stands_for
        )


def _forget(worker: Any, why: str | None) -> None:
    """Forget the statistics of the check, and draft no more if there is a reason."""
    if (adapter := worker.adapter) is not None:
        adapter.forget_stats()
        if why is not None:
            adapter.switch_off(why)
