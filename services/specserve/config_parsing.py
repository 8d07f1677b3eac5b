"""From text to configuration, with errors that name the key, the value and what was wanted.

Knows the configuration models; knows no command line, no files and no environment.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specserve.config import SpeculativeConfig
from specserve.errors import ConfigurationError

SUPPORTED_METHODS = ("draft_model", "ngram")
UNSUPPORTED_METHODS = ("suffix", "eagle", "eagle3", "mtp", "medusa")
"""Methods that users of this field know and that this release has not."""

UNSUPPORTED_KEYS = frozenset(
    {
        "draft_sample_method",
        "num_speculative_tokens_per_batch_size",
        "quantization",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "use_heterogeneous_vocab",
    }
)
"""Keys of other servers that this release has not."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read the JSON object given to `--speculative-config`.

    Raises:
        ConfigurationError: not JSON, an unknown key, a wrong value, or a method not yet there.
    """
    what = "--speculative-config"
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{what}: not JSON ({error.msg} at character {error.pos}); wanted an object such as "
            '{"method": "draft_model", "model": "DIRECTORY", "num_speculative_tokens": 4}'
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{what}: found {text!r}, wanted a JSON object")
    method = values.get("method")
    if method in UNSUPPORTED_METHODS:
        raise ConfigurationError(
            f"{what}: method {method!r} is not supported yet; "
            f"supported: {', '.join(SUPPORTED_METHODS)}"
        )
    for key in values:
        if key in UNSUPPORTED_KEYS:
            raise ConfigurationError(f"{what}: key {key!r} is not supported yet")
    config = build(SpeculativeConfig, values, what)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigurationError(
            f"{what}: prompt_lookup_min {config.prompt_lookup_min} is above "
            f"prompt_lookup_max {config.prompt_lookup_max}"
        )
    return config


def build(
    model: type[ModelT],
    values: Mapping[str, Any],
    what: str = "",
    spell: Callable[[str], str] = str,
) -> ModelT:
    """Validate `values` into `model`, turning every complaint into one ConfigurationError.

    Args:
        what: where the values came from, put before the complaints.
        spell: turns a field's name into what the user typed, such as a flag.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        details = error.errors(include_url=False)
        complaints = [_complaint(detail, model, spell) for detail in details]
        prefix = f"{what}: " if what else ""
        raise ConfigurationError(prefix + "; ".join(complaints)) from error


def _complaint(detail: ErrorDetails, model: type[BaseModel], spell: Callable[[str], str]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {name!r}{did_you_mean(name, model.model_fields)}"
    if detail["type"] == "missing":
        return f"{spell(name)}: missing"
    wanted = detail["msg"].removeprefix("Input should be ")
    return f"{spell(name)}: found {detail['input']!r}, wanted {wanted}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the string under each field of a configuration model: its help text."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(base)))
        classes = [node for node in source.body if isinstance(node, ast.ClassDef)]
        for field, doc in itertools.pairwise(part for node in classes for part in node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            ):
                docs[field.target.id] = " ".join(doc.value.value.split())
    return docs
