"""Requests for fuzzing: bodies that make sense, bodies with one thing wrong, and what the published
document brings forth. The same for the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize")
VOCAB_SIZE = 257
T = TypeVar("T")

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request."""

    kind: str
    """Where it comes from."""
    path: str
    content: bytes
    leaves_early: bool = False
    """The client goes away after the first bytes of the answer."""


def draw(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Draw values, the same for the same seed."""
    drawn: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: T) -> None:
        drawn.append(value)

    while len(drawn) < count:
        # A strategy may run out of new values early: the next seed brings others.
        collect()
        seed += 1
        collect = hypothesis.seed(seed)(collect)
    return drawn[:count]


token_ids = st.integers(0, VOCAB_SIZE - 1)
texts = st.text(st.characters(codec="utf-8", max_codepoint=0x2FFF), min_size=1, max_size=30)
words = st.text("abcdefgh ", min_size=1, max_size=6)
prompts = st.one_of(
    texts,
    st.lists(token_ids, min_size=1, max_size=30),
    st.lists(texts, min_size=1, max_size=3),
    st.lists(st.lists(token_ids, min_size=1, max_size=12), min_size=1, max_size=3),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": words}
    ),
    min_size=1,
    max_size=2,
)
schemas = st.one_of(
    st.sampled_from(
        [
            {"enum": ["yes", "no", None, 12]},
            {"type": "integer"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{4,9}$"}]},
        ]
    ),
    st.dictionaries(st.sampled_from(["type", "enum", "items", "$ref", "not"]), words, max_size=2),
)
languages = st.one_of(
    st.fixed_dictionaries({"json": schemas}),
    st.fixed_dictionaries({"regex": st.sampled_from(["[a-f]{5,9}", "(ab|c)+d", "\\d{4}-\\d\\d"])}),
    st.fixed_dictionaries({"choice": st.lists(words, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"grammar": st.sampled_from(['start: "ab"+ "c"', "start: x"])}),
    st.just({"json_object": True}),
)

OPTIONS: dict[str, SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.3, 1, 1.7, 2]),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "n": st.integers(1, 3),
    "stop": st.one_of(words, st.lists(words, max_size=4)),
    "stop_token_ids": st.lists(token_ids, max_size=4),
    "repetition_penalty": st.floats(0.1, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(token_ids.map(str), st.floats(-100, 100), max_size=6),
    "bad_words": st.lists(words, max_size=4),
    "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=80),
    "min_tokens": st.integers(0, 12),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "num_speculative_tokens": st.integers(0, 4),
    "speculative_method": st.sampled_from(["draft_model", "ngram", "suffix", "cascade"]),
    "rejection_sample_method": st.sampled_from(["auto", "standard", "coupled"]),
    "speculation_metrics": st.sampled_from(["none", "summary", "detailed"]),
    "prompt_logprobs": st.integers(0, 5),
    "response_format": st.one_of(
        st.just({"type": "text"}),
        st.just({"type": "json_object"}),
        schemas.map(
            lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        ),
    ),
    "structured_outputs": languages,
}
OF_COMPLETIONS: dict[str, SearchStrategy[Any]] = {
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
}
NONSENSE = st.one_of(
    st.sampled_from(
        [-1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 2000, [], {}]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=6,
    ),
)


@st.composite
def right_bodies(draw: Callable[..., Any]) -> tuple[str, Body]:
    """Make a body of a few options that mostly makes sense."""
    path = draw(st.sampled_from([COMPLETIONS, COMPLETIONS, CHAT]))
    body: Body = {"max_tokens": draw(st.integers(4, 20))}
    offered = {**OPTIONS, **(OF_COMPLETIONS if path == COMPLETIONS else {})}
    for name in draw(st.lists(st.sampled_from(sorted(offered)), max_size=4, unique=True)):
        body[name] = draw(offered[name])
    if path == COMPLETIONS:
        body["prompt"] = draw(prompts)
    else:
        body["messages"] = draw(messages)
        if draw(st.integers(0, 4)) == 0:
            body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 5))}
    if draw(st.booleans()):
        body["stream"] = True
        if draw(st.booleans()):
            names = ("include_usage", "continuous_usage_stats")
            body["stream_options"] = {name: draw(st.booleans()) for name in names}
    return path, body


@st.composite
def wrong_bodies(draw: Callable[..., Any]) -> tuple[str, Body]:
    """Make a body with one thing in it that is probably wrong."""
    path, body = draw(right_bodies())
    name = draw(st.sampled_from([*sorted({*OPTIONS, *OF_COMPLETIONS, *body}), "promt", ""]))
    return path, {**body, name: draw(NONSENSE)}


def published_requests(
    document: Body, path: str, mode: schemathesis.GenerationMode, count: int, seed: int
) -> list[bytes]:
    """Draw bodies from the published document: right by it, or broken in some way."""
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    cases = draw(operation.as_strategy(generation_mode=mode), count, seed)
    return [_content(case.body) for case in cases]


def _content(body: object) -> bytes:
    if isinstance(body, bytes):
        return body
    # What cannot be said in JSON is sent as the client's library would write it.
    return json.dumps(body, default=repr, ensure_ascii=True).encode()


def fuzz_requests(document: Body, count: int, seed: int) -> list[FuzzRequest]:
    """Make the requests of a run, well mixed: half right, the rest wrong in many ways."""
    num_wrong, num_published, num_broken = count * 3 // 20, count // 5, count // 10
    num_right = count - num_wrong - num_published - num_broken
    made = [
        FuzzRequest("right", path, json.dumps(body).encode(), leaves_early=index % 12 == 5)
        for index, (path, body) in enumerate(draw(right_bodies(), num_right, seed))
    ]
    made += [
        FuzzRequest("one field wrong", path, json.dumps(body).encode())
        for path, body in draw(wrong_bodies(), num_wrong, seed + 1000)
    ]
    modes = {
        "by the document": (schemathesis.GenerationMode.POSITIVE, num_published),
        "broken": (schemathesis.GenerationMode.NEGATIVE, num_broken),
    }
    for kind, (mode, total) in modes.items():
        for path, share in zip(PATHS, _shares(total), strict=True):
            contents = published_requests(document, path, mode, share, seed + 2000)
            made += [FuzzRequest(kind, path, content) for content in contents]
    return [made[(index * _stride(len(made))) % len(made)] for index in range(len(made))]


def _shares(total: int) -> Sequence[int]:
    """Give the generating endpoints most of it."""
    few = max(1, total // 12)
    return (total - few * 2) // 2, total - few * 2 - (total - few * 2) // 2, few, few


def _stride(count: int) -> int:
    """Return a step that visits every place once and mixes kinds."""
    return next(step for step in (7919, 7907, 7901, 7883) if count % step)
