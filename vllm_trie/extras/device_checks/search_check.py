"""A few native beam searches, before an engine serves on a GPU or on a release of vLLM that the
ledger does not list.

Searches ran on one device, an H200. Those of several widths therefore run through the whole engine,
across two KV blocks and beside ordinary requests, and every hypothesis is computed again as a
prompt, in one go. The same search without its copies of KV must fail that
comparison. An engine whose searches raise or are wrong serves with vLLM's own beam search.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreReadyResponse
from vllm.v1.request import Request

from vllm_trie.extras.device_checks.engine_steps import (
    drop_requests,
    keep_serving,
    outputs_of,
)
from vllm_trie.hooks.ledger import is_unlisted
from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.start.limits import is_cuda, reason_off
from vllm_trie.hooks.wire import SEARCH_KEY, ReadyResponse, internal_params
from vllm_trie.searches import BeamOptions
from vllm_trie.searches.engine.beam_support import beam_slots, min_blocks
from vllm_trie.searches.engine.scheduler.beam_scheduler import TrieBeamScheduler
from vllm_trie.searches.engine.scheduler.tables import num_blocks
from vllm_trie.searches.engine.search_wire import BeamSpec, SearchAnswer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

logger = init_logger(f"vllm.{__name__}")

_WIDTHS = (2, 9, 64)
"""The last one is as wide as the engine allows, if that is less, and for GPUs only: it takes a CPU
seconds."""
_NUM_ORDINARY = 4
_LOGPROBS, _PROMPT_LOGPROBS = 5, 1
"""As many as in vLLM's warm-up, behind which it watches for kernels that are compiled."""
BLIND = "the check does not see missing copies of KV"
"""What it says where hypotheses are right without copies, as those that never part in a block."""

_core = of_beams("v1.engine.core:")


def _allowed_difference(ordinary: float) -> float:
    """Return by how much a log-probability may differ from that of the same token in a prompt.

    Args:
        ordinary: The difference that ordinary requests show.
    """
    return max(2e-3, 4.0 * ordinary)  # float32 kernels differ by less than the former


def has_random_weights(vllm_config: VllmConfig) -> bool:
    """Return whether the model's weights are random: all its tokens are about as likely."""
    return vllm_config.load_config.load_format == "dummy"


@_core.wraps(
    "EngineCore.__init__",
    "checks searches before it serves, on a GPU or on a release that is not listed",
)
def engine_core_init(
    original: Callable[..., None], self: EngineCore, *args: object, **kwargs: object
) -> None:
    """Make the engine, and switch native searches off if they fail their check."""
    original(self, *args, **kwargs)
    scheduler = self.scheduler
    if not isinstance(scheduler, TrieBeamScheduler) or scheduler.beam_off is not None:
        return
    on_trial = is_unlisted()
    if not (is_cuda() or on_trial) or self.vllm_config.parallel_config.data_parallel_size > 1:
        return
    start = time.perf_counter()
    try:
        reason = reason_against_searches(self)
    except Exception as error:
        if not on_trial:
            raise
        reason = f"{type(error).__name__}: {error}"
    if reason is None and has_random_weights(self.vllm_config):
        logger.warning(
            "Native beam search is on, and its results were not checked: the weights are random "
            "(load_format='dummy'), so that wrong searches look like right ones"
        )
    elif reason is None:
        logger.info("Native beam search passed its check in %.1f s", time.perf_counter() - start)
    else:
        scheduler.switch_off(reason)
        if on_trial:
            keep_serving(self, reason)


@_core.wraps("EngineCoreProc._make_ready_response", "tells the front end why searches are off")
def ready_response(
    original: Callable[..., EngineCoreReadyResponse], self: EngineCore
) -> EngineCoreReadyResponse:
    """Add why the engine has no native beam search."""
    response = original(self)
    return ReadyResponse(**vars(response), beams_off=reason_off(self.vllm_config))


class _Text(NamedTuple):
    """Tokens that the engine has generated behind a prompt.

    Attributes:
        logprobs: float [tokens].
        score: Their mean, as a search has it.
    """

    prompt: list[int]
    token_ids: list[int]
    logprobs: np.ndarray
    score: float


def reason_against_searches(core: EngineCore) -> str | None:
    """Return why the engine must serve without native searches, None if it need not.

    Args:
        core: Without requests.
    """
    try:
        return _Check(core).reason()
    except Exception as error:
        logger.exception("The check of native beam search failed")
        drop_requests(core)
        return f"{type(error).__name__}: {error}"
    finally:
        core.reset_prefix_cache()


class _Check:
    """The searches, and what their hypotheses are compared with."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        scheduler: Any = core.scheduler
        block_size, max_len = scheduler.block_size, scheduler.max_model_len
        self._prompt_len = max(1, min(block_size - 3, max_len // 3))
        self._num_tokens = min(block_size + 8, max_len - self._prompt_len - 1)
        slots = beam_slots(core.vllm_config)
        num_groups = len(scheduler.kv_cache_config.kv_cache_groups)
        blocks = num_blocks(scheduler.kv_cache_manager) // num_groups
        self._widths = [
            width
            for width in sorted({min(width, slots) for width in _WIDTHS[: 3 if is_cuda() else 2]})
            if width > 1
            and min_blocks(self._prompt_len, width, self._num_tokens, block_size) <= blocks
        ]
        self._is_random = has_random_weights(core.vllm_config)
        self._vocab_size = core.vllm_config.model_config.get_vocab_size()
        self._random = np.random.default_rng(0)
        self._ids = (f"_vllm_trie_check_{number}" for number in itertools.count())

    def reason(self) -> str | None:
        """Return what is wrong, None if nothing is."""
        if self._num_tokens < 2 or not self._widths:
            return "the engine has no room for a search that could be checked"
        width = self._widths[len(self._widths) // 2]
        prompt = self._prompt()
        ordinary = [self._request(self._prompt(), None, _LOGPROBS) for _ in range(_NUM_ORDINARY)]
        searches = [self._request(self._prompt(), width) for width in self._widths]
        # With the best of each beam among its log-probabilities, the scheduler chooses, not the
        # device; nothing else differs.
        twins = [self._request(prompt, width, logprobs) for logprobs in (0, 1)]
        texts = self._run([*ordinary, *searches, *twins])
        hypotheses = [text for request in (*searches, *twins) for text in texts[request]]
        ordinary_difference = max(self._differences([texts[r][0] for r in ordinary]))
        allowed = _allowed_difference(ordinary_difference)
        worst = float(np.max(self._differences(hypotheses)))  # NaN where one is
        if not worst <= allowed:
            return (
                f"log-probabilities of a hypothesis differ by {worst:.2g} a token from those of "
                f"the same tokens as a prompt, allowed is {allowed:.2g}"
            )
        first, second = (texts[request][0].score for request in twins)
        if not abs(first - second) <= allowed:
            return f"the device finds a best hypothesis of score {first}, the scheduler {second}"
        with _without_copies(self._core.scheduler):
            broken = self._request(self._prompt(), width, logprobs=1)
            worst = max(self._differences(self._run([broken])[broken]))
        if worst <= allowed and not self._is_random:
            return BLIND
        return None

    def _prompt(self) -> list[int]:
        tokens: list[int] = self._random.integers(self._vocab_size, size=self._prompt_len).tolist()
        return tokens

    def _request(self, prompt: list[int], width: int | None = None, logprobs: int = 0) -> Request:
        """Return a search, or an ordinary request if `width` is None."""
        params = internal_params(self._num_tokens, logprobs=logprobs)
        if width is not None:
            search = BeamSpec(width, BeamOptions(beam_width=width)).packed()
            params.extra_args = {SEARCH_KEY: search}
        return self._new(prompt, params)

    def _new(self, prompt: list[int], params: SamplingParams) -> Request:
        hasher = self._core.request_block_hasher
        return Request(next(self._ids), prompt, params, None, block_hasher=hasher)

    def _run(self, requests: Sequence[Request]) -> dict[Request, list[_Text]]:
        """Run requests to their end; return what they generated, a search its hypotheses."""
        return {
            request: _texts(request, outputs)
            for request, outputs in zip(requests, outputs_of(self._core, requests), strict=True)
        }

    def _differences(self, texts: Sequence[_Text]) -> list[float]:
        """Return by how much a token's log-probability differs from that of the same token as a
        part of a prompt, in the mean of a text or in its score."""
        params = internal_params(1, prompt_logprobs=_PROMPT_LOGPROBS)
        prompts = [self._new([*text.prompt, *text.token_ids], params) for text in texts]
        differences = []
        for text, outputs in zip(texts, outputs_of(self._core, prompts), strict=True):
            of_prompt = next(o.new_prompt_logprobs_tensors for o in outputs)
            assert of_prompt is not None
            expected = of_prompt.logprobs[-len(text.token_ids) :, 0].numpy()
            of_logprobs = np.abs(text.logprobs - expected).mean()
            differences.append(float(np.maximum(of_logprobs, abs(text.score - expected.mean()))))
        return differences


def _texts(request: Request, outputs: Sequence[EngineCoreOutput]) -> list[_Text]:
    """Return what a request has generated; of a search its hypotheses, best first."""
    prompt = request.prompt_token_ids or []
    token_ids = [token for output in outputs for token in output.new_token_ids]
    answer: SearchAnswer | None = (outputs[-1].kv_transfer_params or {}).get(SEARCH_KEY)
    if answer is None:
        parts = [output.new_logprobs.logprobs[:, 0] for output in outputs if output.new_logprobs]
        ordinary = np.concatenate(parts)
        return [_Text(prompt, token_ids, ordinary, float(ordinary.mean()))]
    assert answer.logprobs is not None
    logprobs = np.frombuffer(answer.logprobs[1], dtype=np.float32).reshape(len(token_ids), -1)
    texts, start = [], 0
    for hypothesis in answer.hypotheses:
        part = slice(start, start + hypothesis.num_tokens)
        texts.append(_Text(prompt, token_ids[part], logprobs[part, 0], hypothesis.beam["score"]))
        start += hypothesis.num_tokens
    return texts


@contextmanager
def _without_copies(scheduler: Any) -> Iterator[None]:
    """Have the worker copy no KV for the searches of a scheduler."""
    schedule = scheduler.schedule

    def without_copies(*args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = schedule(*args, **kwargs)
        output.kv_cache_block_copies = None
        return output

    scheduler.schedule = without_copies
    try:
        yield
    finally:
        del scheduler.schedule
