"""Settings of a beam search: the user's options, and what the algorithm needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vllm_trie.refusal import shown

MAX_LENGTH_PENALTY = 5.0
"""Largest absolute value of the option; powers of lengths stay far from float32's limits."""

MAX_RULES = 4096
"""Entries of the lists of one request."""
MAX_CANDIDATES = 65_536
"""Candidates of a step that stop tokens may ask for, ``beam_width * (1 + stop tokens)``."""
MAX_STOP_LENGTH = 256
"""Characters of a stop string; for each candidate a text of its length is decoded."""
MAX_DIVERSITY_PENALTY = 100_000.0
"""Far from float32's limits, as a token may be taken by every beam."""

EarlyStopping = bool | Literal["never"]
Options = TypeVar("Options", bound=BaseModel)


def _as_bool(value: object) -> object:
    # vLLM's HTTP field for extra arguments has strings and numbers, but no booleans.
    if isinstance(value, (int, str)):
        return {"0": False, "1": True, "false": False, "true": True}.get(str(value).lower(), value)
    return value


_Flag = Annotated[bool, BeforeValidator(_as_bool)]


class BeamOptions(BaseModel):
    """The options a user writes next to ``beam_width`` in ``SamplingParams.extra_args``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    beam_width: int = Field(ge=1, description="Hypotheses that are extended in each step.")
    length_penalty: float = Field(
        default=1.0,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        allow_inf_nan=False,
        description="Exponent of the length by which a hypothesis' sum of log-probabilities is "
        "divided; above 0 favours longer hypotheses.",
    )
    early_stopping: Annotated[EarlyStopping, BeforeValidator(_as_bool)] = Field(
        default=False,
        description="True: stop at beam_width finished hypotheses; False: when no running one can "
        "replace one of them at its present length; 'never': at any length.",
    )
    do_sample: _Flag = Field(
        default=False,
        description="Sample the continuations without replacement instead of taking the best.",
    )
    num_beam_groups: int = Field(
        default=1, ge=1, description="Groups of a diverse beam search; must divide beam_width."
    )
    diversity_penalty: float = Field(
        default=0.0,
        ge=0.0,
        le=MAX_DIVERSITY_PENALTY,
        allow_inf_nan=False,
        description="Subtracted from a token's log-probability for every beam of an earlier group "
        "that takes it in the same step.",
    )
    no_repeat_ngram_size: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="No sequence of this many tokens occurs twice in prompt and hypothesis; 0: no "
        "rule.",
    )
    beam_trace: _Flag = Field(
        default=False, description="Return the whole trie of the search, to draw it."
    )
    detokenize: _Flag = Field(
        default=True, description="Return the text of outputs; false saves the time."
    )

    @model_validator(mode="after")
    def _check_together(self) -> BeamOptions:
        if self.beam_width % self.num_beam_groups:
            raise ValueError(
                f"num_beam_groups must divide beam_width={self.beam_width}, "
                f"got {self.num_beam_groups}"
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ValueError(
                f"diversity_penalty={self.diversity_penalty} needs num_beam_groups of at least 2; "
                "set num_beam_groups or leave diversity_penalty out"
            )
        if self.do_sample and self.num_beam_groups > 1:
            raise ValueError(
                "do_sample and num_beam_groups above 1 exclude each other; leave one of them out"
            )
        return self


def parse_options(model: type[Options], values: Mapping[str, Any]) -> Options:
    """Check beam-search keys of ``extra_args``.

    Raises:
        ValueError: One part for every option that is wrong: its name, what is allowed and its
            value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}  # by option: a union reports one problem per member
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else ""
            message = problem["msg"].removeprefix("Value error, ")
            if name == "early_stopping":
                message = "must be true, false or 'never'"
            if name in values:
                message += f", got {shown(values[name])}"
            problems[name] = f"{name}: {message}" if name else message
        raise ValueError("beam search: " + "; ".join(problems.values())) from None


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of one search; those without a line here are explained in :class:`BeamOptions`.

    Attributes:
        max_new_tokens: Longest hypothesis, in generated tokens, at least 1.
        stop_token_ids: Tokens that end a hypothesis (EOS and the user's own).
        early_stopping: As in :class:`BeamOptions`, but a search of width 1 always stops at its
            first finished hypothesis: it is greedy decoding.
        temperature: Divides the log-probabilities; only with ``do_sample``.
        top_k: Candidates kept per hypothesis, 0 for all; only with ``do_sample``.
        top_p: Probability mass kept per hypothesis; only with ``do_sample``.
        seed: Seed of the sampling; None takes one from the operating system.
        min_tokens: Generated tokens before which stop tokens are forbidden.
        repetition_penalty: At least 1; multiplies the log-probabilities of tokens of the prompt and
            of the hypothesis.
        presence_penalty: At least 0; subtracted once for tokens of the hypothesis.
        frequency_penalty: At least 0; subtracted for each occurrence in the hypothesis.
        bad_words: Token sequences that must not be generated.
        no_repeat_ngram_size: Tokens of a sequence that must not occur twice in prompt and
            hypothesis; 0 for no such rule.
        logit_bias: Tokens, and what is added to their log-probabilities before penalties.
        trace: Keep every candidate that was looked at.
        most_added: Largest amount that the last token of a hypothesis adds to its score in
            addition to its log-probability.
    """

    beam_width: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    trace: bool = False
    most_added: float = 0.0

    @property
    def group_width(self) -> int:
        """Hypotheses per group of a diverse beam search."""
        return self.beam_width // self.num_beam_groups

    @property
    def num_candidates(self) -> int:
        """Candidates looked at per step and group of a diverse beam search.

        With ``s`` stop tokens, at most ``s`` continuations of a hypothesis end it, so
        ``(1 + s) * group_width`` candidates always hold ``group_width`` that go on. Sampling at
        width 1 draws one token: it is plain sampling.
        """
        if self.do_sample and self.beam_width == 1:
            return 1
        return max(2, 1 + len(self.stop_token_ids)) * self.group_width

    @property
    def stops_when_full(self) -> bool:
        """Whether the search ends as soon as ``group_width`` hypotheses are finished."""
        return self.early_stopping is True or self.beam_width == 1
