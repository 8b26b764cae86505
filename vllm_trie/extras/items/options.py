"""Options of requests that search inside a catalogue, and their checks in the front end."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_trie.extras.items.catalogues import Catalogues
from vllm_trie.extras.items.search import ItemSearch
from vllm_trie.extras.items.selection import Rules
from vllm_trie.extras.items.sources import MAX_LENGTH
from vllm_trie.extras.items.start import ITEMS, catalogue_paths
from vllm_trie.extras.items.trie_file import ItemsError, ItemsHeader, read_header
from vllm_trie.files import watched_file
from vllm_trie.hooks.start.additional_config import spelled
from vllm_trie.refusal import shown
from vllm_trie.searches import BeamOptions, SearchSettings
from vllm_trie.searches.engine.beam_support import BeamRequestError
from vllm_trie.searches.engine.constraint import SearchConstraint
from vllm_trie.searches.settings import MAX_RULES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

MAX_WEIGHT_FACTOR = 1000.0
_RULES = ("allow_items", "allow_prefixes", "deny_items", "deny_prefixes")

_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameters that do not go with items, and the values that they may have."""


def _from_json(value: object) -> object:
    # vLLM's HTTP field for extra arguments has lists of strings and numbers, but no lists of lists.
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list | tuple) and len(value) > MAX_RULES:
        raise PydanticCustomError(
            "too_many",
            "{given} entries, at most {allowed} are allowed; use prefixes for many items",
            {"given": len(value), "allowed": MAX_RULES},
        )
    return value


def _ids(value: object, validate: Callable[[object], Any]) -> Any:
    value = _from_json(value)
    try:
        return validate(value)
    except ValidationError:  # a problem for each kind
        raise PydanticCustomError(
            "ids", "must be a list of integers of 64 bits, or one of strings"
        ) from None


def _encodable(text: str) -> str:
    text.encode()  # Half of a surrogate pair is no Unicode text.
    return text


_Entries = Field(strict=False, fail_fast=True)
"""Tuples are lists, too; a wrong list has one error, not one for each of its entries."""
_Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Text = Annotated[str, AfterValidator(_encodable)]
_Ids = Annotated[
    Annotated[list[_Id], _Entries] | Annotated[list[_Text], _Entries], WrapValidator(_ids)
]
_Prefix = Annotated[
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
    Field(min_length=1, max_length=MAX_LENGTH, strict=False, fail_fast=True),
]
_Prefixes = Annotated[list[_Prefix], _Entries, BeforeValidator(_from_json)]


class ItemOptions(SearchConstraint):
    """The options of a search inside a catalogue."""

    items: _Text | None = Field(
        default=None,
        description="Name of a catalogue of the engine: every hypothesis is one of its items.",
    )
    items_end: Literal["complete", "eos"] = Field(
        default="complete",
        description="'complete': a hypothesis ends with its item; 'eos': EOS must follow, and its "
        "log-probability counts. Only with items.",
    )
    normalize: Literal["vocabulary", "valid"] = Field(
        default="vocabulary",
        description="Log-probabilities over the whole vocabulary, or over the tokens that may "
        "follow. Only with items.",
    )
    weight_factor: float = Field(
        default=0.0,
        ge=-MAX_WEIGHT_FACTOR,
        le=MAX_WEIGHT_FACTOR,
        allow_inf_nan=False,
        description="The weight of a complete item, times this, is added to its sum of "
        "log-probabilities. Only with items.",
    )
    allow_items: _Ids | None = Field(
        default=None, description="Ids of the items that are valid, next to allow_prefixes."
    )
    allow_prefixes: _Prefixes | None = Field(
        default=None, description="Items that begin with one of these token sequences are valid."
    )
    deny_items: _Ids | None = Field(default=None, description="Ids of items that are not valid.")
    deny_prefixes: _Prefixes | None = Field(
        default=None,
        description="Items that begin with one of these token sequences are not valid.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> ItemOptions:
        if self.items is None:
            for name in sorted(self.model_fields_set - {ITEMS}):
                if getattr(self, name) != ItemOptions.model_fields[name].default:
                    raise ValueError(
                        f"{name}={shown(getattr(self, name))} needs items; name a catalogue of the "
                        f"engine, or leave {name} out"
                    )
        num_rules = sum(len(getattr(self, name) or ()) for name in _RULES)
        if num_rules > MAX_RULES:
            raise ValueError(
                f"{', '.join(_RULES)} have {num_rules} entries, at most {MAX_RULES} are allowed; "
                "use prefixes for many items, or a catalogue of its own"
            )
        return self

    # -- front end ---------------------------------------------------------------------------------

    def check(self, vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions) -> None:
        for name in ("no_repeat_ngram_size", "do_sample", "num_beam_groups"):
            if getattr(options, name) != BeamOptions.model_fields[name].default:
                raise BeamRequestError(
                    f"beam search: items and {name} exclude each other; leave one of them out"
                )
        names = catalogue_paths(vllm_config)
        if self.items not in names:
            served = ", ".join(map(repr, names)) or "none"
            raise BeamRequestError(
                f"items={shown(self.items)} is no catalogue of this engine, which has {served}; "
                f"name one of them, or start the engine with {spelled(ITEMS)}"
            )
        for name, allowed in _NOT_SERVED.items():
            if (value := getattr(params, name)) not in allowed:
                raise BeamRequestError(
                    f"{name}={shown(value)} is not supported with items; leave it out"
                )
        if self.items_end == "eos" and params.ignore_eos:
            raise BeamRequestError("ignore_eos=True is not supported with items; leave it out")

    def check_processed(
        self, vllm_config: VllmConfig, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        """Refuse a request whose hypotheses would end before the longest item is complete."""
        assert self.items is not None
        with_eos = self.items_end == "eos"
        if with_eos and params.eos_token_id is None:
            raise BeamRequestError(
                "beam search: items_end='eos' needs a model with an EOS token; use 'complete'"
            )
        path = catalogue_paths(vllm_config)[self.items]
        try:
            header = _read_header(path, time.monotonic() // watched_file.INTERVAL)
        except (ItemsError, OSError):
            return  # the scheduler serves the version before, and checks the length, too
        self._check_ids(header)
        needed = header.max_length + with_eos
        room = vllm_config.model_config.max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens < needed:
            raise BeamRequestError(
                f"max_tokens must be at least {needed}, the longest item of "
                f"{self.items!r}{' and EOS' if with_eos else ''}, got {params.max_tokens}"
            )
        if room < needed:
            raise BeamRequestError(
                f"the longest item of {self.items!r} needs {needed} tokens, the "
                f"prompt of {num_prompt_tokens} tokens leaves {room}; shorten the prompt or start "
                "the engine with a larger max_model_len"
            )

    def _check_ids(self, header: ItemsHeader) -> None:
        kind = {"int": int, "str": str}[header.ids]
        for name in ("allow_items", "deny_items"):
            if (ids := getattr(self, name)) and not isinstance(ids[0], kind):
                raise BeamRequestError(
                    f"{name} has {shown(ids[0])}, the ids of {self.items!r} are of type "
                    f"{header.ids}; write them so"
                )

    def stop_token_ids(self, params: SamplingParams) -> list[int | None]:
        return [params.eos_token_id] if self.items_end == "eos" else []

    # -- scheduler ---------------------------------------------------------------------------------

    @classmethod
    def open(cls, vllm_config: VllmConfig) -> Catalogues:
        vocab_size = vllm_config.model_config.get_vocab_size()
        return Catalogues(catalogue_paths(vllm_config), vocab_size)

    def start(
        self, shared: Catalogues, params: SamplingParams, settings: SearchSettings
    ) -> ItemSearch:
        """Return the search of a request.

        Raises:
            ValueError: It has no room for the longest item.
        """
        assert self.items is not None
        catalogue = shared.latest(self.items)
        needed = catalogue.max_length + (self.items_end == "eos")
        if settings.max_new_tokens < needed:
            raise ValueError(
                f"the longest item needs {needed} tokens, the request has room for "
                f"{settings.max_new_tokens}; raise max_tokens or shorten the prompt"
            )
        rules = Rules(
            self.allow_items, self.allow_prefixes, self.deny_items or (), self.deny_prefixes or ()
        )
        return ItemSearch(
            catalogue,
            shared.select(catalogue, rules),
            self.normalize,
            replace(settings, max_new_tokens=needed),
            params.eos_token_id if self.items_end == "eos" else None,
            self.weight_factor,
        )


@functools.lru_cache(maxsize=64)
def _read_header(path: Path, interval: float) -> ItemsHeader:
    """Look at a file once in each interval, as the engine does: the server waits for it."""
    return read_header(path)
