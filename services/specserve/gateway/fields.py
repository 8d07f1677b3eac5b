"""The fields of a request that both endpoints share, with their ranges.

Knows single fields; what only fits together is checked in `plan.py`, what depends on the served
pair too. Ranges are those of OpenAI's API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
)

from specserve.config import SpeculativeMethod
from specserve.errors import quoted
from specserve.grammar.lark import MAX_CHOICES

MAX_INT = 2**31 - 1
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1

MAX_BIASES = 300
MAX_BIAS = 100
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256

MAX_STOP_CHARACTERS = 1024

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]


def _read_biases(value: object) -> dict[int, float]:
    """Read OpenAI's object of token ids, which are keys and so strings, and numbers."""
    if not isinstance(value, dict):
        raise ValueError("an object of token ids and numbers was wanted")
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries, at most {MAX_BIASES} were wanted")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # More digits than any id has would be slow to read.
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_INT))):
            raise ValueError(f"{quoted(key)} is no token id; digits were wanted")
        # NaN fails the comparison too.
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"{quoted(bias)} for token {key}; a number in [-{MAX_BIAS}, {MAX_BIAS}] was wanted"
            )
        if int(key) in biases:
            raise ValueError(f"token {int(key)} is named twice; once was wanted")
        biases[int(key)] = float(bias)
    return biases


def _list_of_one(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Base of everything a client sends: no coercion, and an unknown field is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    """One more chunk, with `choices: []` and the usage, ends the stream."""
    continuous_usage_stats: bool = False
    """Every chunk carries the usage so far."""
    include_obfuscation: Literal[False] = False
    """Random padding against traffic analysis; only its absence is honoured."""


class JsonSchemaFormat(Body):
    """A named JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    """Inert."""
    description: str | None = None
    """Inert."""
    definition: dict[str, object] = Field(alias="schema")
    """The schema; a keyword that cannot be honoured is refused."""
    strict: bool | None = None
    """Inert: every text is held to the schema."""


class ResponseFormat(Body):
    """What the text is."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON of one schema."""
    json_schema: JsonSchemaFormat | None = None
    """With the type `json_schema`, and only with it."""


class StructuredOutputs(Body):
    """One language that the text is held to, in vLLM's names."""

    json_schema: dict[str, object] | str | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    regex: str | None = None
    """The whole text matches it; look-around and back-references are refused."""
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    """The text is one of these."""
    grammar: str | None = None
    """A Lark grammar, as llguidance reads it; `start` is the text."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace between JSON's tokens; None takes any."""


class GenerationFields(Body):
    """What a request of either endpoint may say."""

    model: str | None = None
    """Served model name; may be omitted."""
    stream: bool = False
    """Answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only together with `stream`."""
    n: int = Field(1, ge=1)
    """Choices per prompt."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    """Most output tokens per choice."""
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    """Below 1e-5 decoding is greedy."""
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    """Keep the smallest set of most likely tokens with at least this probability."""
    top_k: int = Field(0, ge=-1, le=MAX_INT)
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    """Keep tokens with at least this share of the most likely token's probability."""
    repetition_penalty: float = Field(1.0, gt=0, le=2, allow_inf_nan=False)
    """Divides positive logits, multiplies others, of tokens in prompt or output; 1 is none."""
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    """Taken off the logit of each token that the output holds."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    """The same, times how often the output holds it."""
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(_read_biases),
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {
                    "type": "number",
                    "minimum": -MAX_BIAS,
                    "maximum": MAX_BIAS,
                },
                "maxProperties": MAX_BIASES,
            }
        ),
    ] = Field(default_factory=dict)
    """Token id to what is added to its logit."""
    bad_words: Annotated[list[BadWord], FailFast()] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    """Phrases whose tokens, in this order, the output never holds: as a text begins with them, and
    behind a space."""
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, min_length=1)
    """The only ids that may be emitted; EOS too only if named. Absent, all are."""
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    """Until the output holds so many tokens there is no EOS and no stop id, and stop strings end
    nothing."""
    response_format: ResponseFormat | None = None
    """What the text is. Of this and the next five fields at most one asks for something."""
    structured_outputs: StructuredOutputs | None = None
    """A language that the text is held to; EOS is allowed where it is whole, and only there."""
    guided_json: dict[str, object] | str | None = None
    """`structured_outputs.json` by its older name."""
    guided_regex: str | None = None
    """`structured_outputs.regex` by its older name."""
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    """`structured_outputs.choice` by its older name."""
    guided_grammar: str | None = None
    """`structured_outputs.grammar` by its older name."""
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    """Taken modulo 2^64, so that -1 is 2^64 - 1; None draws one from the operating system."""
    stop: Annotated[
        list[StopString],
        FailFast(),
        BeforeValidator(_list_of_one, json_schema_input_type=StopString | list[StopString]),
    ] = Field(default_factory=list)
    """A string or strings that end the text before their first byte."""
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, max_length=128)
    """Ids that end the text."""
    ignore_eos: bool = False
    """The model's own end does not end the text."""
    skip_special_tokens: bool = True
    """Leave the text of special tokens out."""
    return_token_ids: bool = False
    """Answer `choices[].token_ids`."""
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    """As vLLM's: a smaller number is served sooner, and loses its KV blocks later."""
    prompt_logprobs: int | None = Field(None, ge=0)
    """Answer the log-probability that the target gave each token of the prompt, and so many of the
    most likely ones in its place; 0 answers the prompt's own alone."""
    num_speculative_tokens: int | None = Field(None, ge=0)
    """Draft tokens per round, at most what is configured; 0 switches speculation off."""
    speculative_method: SpeculativeMethod | None = None
    """Proposer, one of those that the deployment offers; None takes the configured one."""
    rejection_sample_method: Literal["auto", "standard", "coupled"] | None = None
    """Acceptance rule above temperature 0; None takes the configured one."""
    speculation_metrics: Literal["none", "summary", "detailed"] = "none"
    """Answer `metrics.speculative_decoding`; detailed adds steps, `choices[].token_origins` and
    `choices[].token_provenance`."""
    user: object = None
    """Accepted and inert."""
    metadata: object = None
    """Accepted and inert."""
    store: object = None
    """Accepted and inert."""
    service_tier: object = None
    """Accepted and inert."""

    @field_validator(
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        mode="before",
    )
    @classmethod
    def _no_huge_integers(cls, value: object) -> object:
        # An integer beyond the floats would overflow before the range check sees it.
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INT:
            raise ValueError(
                f"a number in range was wanted, this one has {value.bit_length()} bits"
            )
        return value
