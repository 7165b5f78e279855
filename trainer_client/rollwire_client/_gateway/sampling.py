"""The sampling fields of each API. What is left out is neutral: no model's defaults count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollwire.types import LogprobBasis

from rollwire_client._data import Sampling

if TYPE_CHECKING:
    from rollwire_client._gateway.fields import Fields

MAX_SEQUENCES = 1024  # of one request
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How the sequences of a request are sampled, and what makes text of them.

    Attributes:
        sampling: Of the first sequence; see ``seeded``.
        n: Sequences of each prompt.
        stop: Stop strings.
        skip_special_tokens: Whether the text is without the tokenizer's special tokens.
    """

    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    logprob_basis: LogprobBasis | None = None
    min_weight_version: int | None = None
    max_weight_version: int | None = None

    def seeded(self, number: int) -> Sampling:
        """For sequence ``number`` of the request, as ``Fleet.generate_many`` seeds them."""
        if self.sampling.seed is None or not number:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + number) % _SEEDS)


def openai_options(fields: Fields) -> SampleOptions:
    """The fields of OpenAI's API, with those that vLLM adds."""
    options = _options(
        fields,
        max_new_tokens=fields.integer("max_tokens", "max_completion_tokens", minimum=1),
        min_new_tokens=fields.integer("min_tokens", minimum=0),
        seed=fields.integer("seed"),
        stop=fields.texts("stop"),
    )
    fields.only("best_of", options.n)
    fields.off("use_beam_search")
    fields.only("length_penalty", 1)
    fields.off("early_stopping")
    fields.off("include_stop_str_in_output")
    for name in ("bad_words", "logits_processors"):
        fields.only(name, [])
    for name in (
        "allowed_token_ids", "truncate_prompt_tokens", "prompt_logprobs", "structured_outputs",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "thinking_token_budget",
    ):  # fmt: skip
        fields.only(name)
    fields.ignore(("detokenize", "spaces_between_special_tokens", "output_kind"))
    return options


def sglang_options(fields: Fields) -> SampleOptions:
    """The fields of SGLang's ``sampling_params``."""
    options = _options(
        fields,
        max_new_tokens=fields.integer("max_new_tokens", minimum=1),
        min_new_tokens=fields.integer("min_new_tokens", minimum=0),
        seed=fields.integer("sampling_seed", "seed"),
        stop=fields.texts("stop"),
    )
    fields.off("no_stop_trim")
    for name in ("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "stop_regex"):
        fields.only(name)
    fields.ignore(("spaces_between_special_tokens", "stream_interval"))
    return options


def _options(
    fields: Fields,
    *,
    max_new_tokens: int | None,
    min_new_tokens: int | None,
    seed: int | None,
    stop: tuple[str, ...],
) -> SampleOptions:
    """The fields that all APIs name alike."""
    neutral = Sampling()
    temperature, top_p = fields.number("temperature"), fields.number("top_p")
    top_k, min_p = fields.integer("top_k", minimum=-1), fields.number("min_p")
    fields.only("presence_penalty", 0)
    fields.only("frequency_penalty", 0)
    fields.only("repetition_penalty", 1)
    fields.only("logit_bias", {})
    sampling = Sampling(
        temperature=neutral.temperature if temperature is None else temperature,
        top_p=neutral.top_p if top_p is None else top_p,
        top_k=neutral.top_k if top_k is None else top_k,
        min_p=neutral.min_p if min_p is None else min_p,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens or 0,
        stop_token_ids=fields.token_ids("stop_token_ids") or (),
        ignore_eos=fields.boolean("ignore_eos"),
        seed=None if seed is None else seed % _SEEDS,
    )
    return SampleOptions(
        sampling=sampling,
        n=fields.integer("n", minimum=1, maximum=MAX_SEQUENCES) or 1,
        stop=stop,
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
    )


def with_rollout_fields(options: SampleOptions, fields: Fields) -> SampleOptions:
    """Adds what rollwire has beyond the other APIs, from the request's body."""
    basis = fields.text("logprob_basis")
    known = {known.value: known for known in LogprobBasis}
    if basis is not None and basis not in known:
        raise fields.wrong("logprob_basis", basis, f"one of {', '.join(known)}")
    return replace(
        options,
        logprob_basis=None if basis is None else known[basis],
        min_weight_version=fields.integer("min_weight_version", minimum=0),
        max_weight_version=fields.integer("max_weight_version", minimum=0),
    )
