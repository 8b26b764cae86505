"""Checks of the extra arguments of every request (over HTTP ``vllm_xargs``).

vLLM carries all of them to the workers, and leaves it to others to read them.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from vllm_trie.hooks.frontend.request_options import brought_options, option_keys
from vllm_trie.hooks.wire import CACHE_SALT, SEARCH_KEY, extra_args_of
from vllm_trie.refusal import shown
from vllm_trie.searches.engine.beam_support import BeamRequestError
from vllm_trie.searches.engine.constraint import constraints, option_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SIMILAR = 0.82
"""Ratio of :class:`difflib.SequenceMatcher` from which a name is taken for a misspelled option."""

OTHER_NAMES = {
    "num_beams": "'beam_width'",
    "beam_size": "'beam_width'",
    "diversity_rate": "'num_beam_groups' and 'diversity_penalty'",
    "num_return_sequences": "SamplingParams.n",
    "max_new_tokens": "SamplingParams.max_tokens",
    "min_new_tokens": "SamplingParams.min_tokens",
    "bad_words_ids": "SamplingParams.bad_words",
}
"""Names of options elsewhere, and what they are here."""

NOT_SERVED = frozenset({
    "begin_suppress_tokens", "constraints", "dola_layers", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "guidance_scale", "max_length", "max_time",
    "min_length", "penalty_alpha", "prefix_allowed_tokens_fn", "renormalize_logits",
    "sequence_bias", "stop_strings", "suppress_tokens", "token_healing", "top_h", "typical_p",
})  # fmt: skip
"""Options of Hugging Face's ``generate`` that change a search and have no counterpart here."""

MAX_SIZE = 262_144
"""Largest size of the keys that nobody else is known to read, characters and numbers together."""
MAX_KEYS = 64
"""Most of these keys."""
_MAX_HELPED, _LONGEST_NAME = 8, 40
"""Unknown keys that are compared with the options, and their characters."""
_OF_VLLM = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Keys that vLLM fills from fields of their own."""


@functools.cache
def _alone() -> frozenset[str]:
    """Return the keys that work alone: misspelled or misplaced, they would be ignored."""
    return option_keys() | {"beam_width", *constraints()}


@functools.cache
def _own() -> frozenset[str]:
    return option_keys() | {CACHE_SALT, *option_names()}


def check_extra_args(vllm_config: VllmConfig, params: object, processors: Sequence[str]) -> None:
    """Refuse keys of the plugin's own, too many or too large keys, and options without a leader.

    An engine with custom logits processors may read keys of any name and size: there, only the
    plugin's own keys have a limit, and options without ``beam_width`` pass.

    Args:
        vllm_config: Of the engine.
        params: Parameters of any request, as the user gave them.
        processors: Names of the engine's custom logits processors.

    Raises:
        BeamRequestError: Naming the key, its size or value, what is allowed and what to do.
    """
    extra_args = extra_args_of(params)
    if not extra_args:
        return
    if SEARCH_KEY in extra_args:  # the engine would trust it
        raise BeamRequestError(
            f"extra_args[{SEARCH_KEY!r}] is for vllm-trie's own use; leave it out, and ask with "
            "'beam_width'"
        )
    others_read = bool(processors or vllm_config.kv_transfer_config)
    limited = extra_args.keys() & _own() if others_read else extra_args.keys() - _OF_VLLM
    if len(limited) > MAX_KEYS:
        raise BeamRequestError(
            f"extra_args has {len(limited)} keys, at most {MAX_KEYS} are allowed where no custom "
            "logits processor reads them; leave some out"
        )
    size = 0
    for name in sorted(limited - brought_options().keys()):
        size += _size(name) + _size(extra_args[name])
        if size > MAX_SIZE:
            raise BeamRequestError(
                f"extra_args has a size of {size} up to the key {name[:80]!r}, at most {MAX_SIZE} "
                "(characters and numbers) are allowed where no custom logits processor reads it; "
                "leave it out"
            )
    if not processors and extra_args.keys().isdisjoint(("beam_width", *constraints())):
        _refuse_without_width(extra_args)


def _refuse_without_width(extra_args: Mapping[str, object]) -> None:
    """Refuse what would be ignored: the request would be decoded without a beam search."""
    unknown = []
    for name, value in extra_args.items():
        if needed := option_names().get(name):
            raise BeamRequestError(
                f"beam search: {name}={shown(value)} needs {needed!r}; add it, or leave {name} out"
            )
        if name in OTHER_NAMES:
            raise BeamRequestError(f"beam search: {name!r} is unknown; use {OTHER_NAMES[name]}")
        if name not in _own():
            unknown.append(name)
    if likeness := next(_misspelled(unknown, _alone()), None):
        raise BeamRequestError("extra_args[{!r}] is unknown; did you mean {!r}?".format(*likeness))


def _misspelled(names: Iterable[str], options: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield which of the first unknown names look like an option, and that option."""
    for name in itertools.islice(names, _MAX_HELPED):
        if len(name) <= _LONGEST_NAME:
            for meant in difflib.get_close_matches(name, options, n=1, cutoff=SIMILAR):
                yield name, meant


def refuse_misspelled(names: Iterable[str]) -> None:
    """Refuse keys that look like an option; others may belong to other plugins."""
    names = list(names)
    for name in names:
        if name in OTHER_NAMES:
            raise BeamRequestError(
                f"beam search: {name!r} is unknown with 'beam_width'; use {OTHER_NAMES[name]}"
            )
        if name in NOT_SERVED:
            raise BeamRequestError(
                f"beam search: {name!r} of Hugging Face's generate is not supported with "
                "'beam_width'; leave it out"
            )
    if likeness := next(_misspelled(names, option_names()), None):
        raise BeamRequestError("beam search: {!r} is unknown; did you mean {!r}?".format(*likeness))


def refuse_misplaced(fields: Mapping[str, object], is_beam: bool) -> None:
    """Refuse options among the fields of an HTTP request that vLLM does not know and ignores.

    Of a beam search all options; of another request those that work alone, as clients of other
    servers may send the others.
    """
    options = option_names().keys() | _alone() if is_beam else _alone()
    for name, value in fields.items():
        if name in options:
            raise BeamRequestError(
                f"{name}={shown(value)} is no field of a request and would be ignored; put it into "
                "'vllm_xargs'"
            )


def _size(value: object) -> int:
    """Return the characters and numbers of a value; containers are followed."""
    size, pending = 0, [value]
    while pending and size <= MAX_SIZE:
        item = pending.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            if len(item) > MAX_SIZE:
                return len(item)
            others = [entry for entry in item if type(entry) not in (int, float)]
            size += len(item) - len(others)
            pending += others
        else:
            size += 1
    return size


def custom_processors(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the custom logits processors that the engine loads."""
    configured = vllm_config.model_config.logits_processors or []
    names = [p if isinstance(p, str) else p.__qualname__ for p in configured]
    return [*names, *_installed_processors()]


@functools.cache
def _installed_processors() -> tuple[str, ...]:
    return tuple(point.value for point in entry_points(group=LOGITSPROCS_GROUP))
