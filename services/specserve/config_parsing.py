"""From text to configuration, with errors that name the key, the value and what was wanted.

Knows the configuration models; knows no command line, no files and no environment.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specserve.config import SpeculativeConfig, SpeculativeMethod
from specserve.errors import ConfigurationError, quoted

SUPPORTED_METHODS: tuple[str, ...] = get_args(SpeculativeMethod)
UNSUPPORTED_METHODS = ("eagle", "eagle3", "mtp", "medusa")
"""Methods that users of this field know and that this release has not."""

UNSUPPORTED_KEYS = frozenset(
    {
        "draft_sample_method",
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
    except ValueError as error:
        raise ConfigurationError(f"{what}: a number has more digits than can be read") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{what}: found {quoted(text)}, wanted a JSON object")
    method = values.get("method")
    if method in UNSUPPORTED_METHODS:
        raise ConfigurationError(
            f"{what}: method {quoted(method)} is not supported yet; "
            f"supported: {', '.join(SUPPORTED_METHODS)}"
        )
    for key in values:
        if key in UNSUPPORTED_KEYS:
            raise ConfigurationError(f"{what}: key {quoted(key)} is not supported yet")
    config = build(SpeculativeConfig, values, what)
    check_speculative(config, what)
    return config


def check_speculative(config: SpeculativeConfig, what: str = "speculative") -> None:
    """Check what only fits together.

    Args:
        what: where the configuration came from, put before the complaint.

    Raises:
        ConfigurationError: two settings contradict one another; both are named.
    """
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigurationError(
            f"{what}: prompt_lookup_min {config.prompt_lookup_min} is above "
            f"prompt_lookup_max {config.prompt_lookup_max}"
        )
    _check_batch_sizes(config.num_speculative_tokens_per_batch_size, what)
    _check_synthetic(config, what)
    # A match and its guess share the depth, so the longest useful match is one token shorter.
    longest = config.suffix_decoding_max_tree_depth - 1
    if config.method == "cascade" and config.cascade_min_match_length > longest:
        raise ConfigurationError(
            f"{what}: cascade_min_match_length {config.cascade_min_match_length} is above {longest}"
            ", the longest match that suffix_decoding_max_tree_depth leaves room to go on from"
        )


def _check_synthetic(config: SpeculativeConfig, what: str) -> None:
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    if config.rejection_sample_method != "synthetic":
        if rates or length is not None:
            raise ConfigurationError(
                f"{what}: synthetic_acceptance_rates and synthetic_acceptance_length go with "
                "rejection_sample_method synthetic only"
            )
        return
    k = config.num_speculative_tokens
    if bool(rates) == (length is not None):
        raise ConfigurationError(
            f"{what}: rejection_sample_method synthetic needs one of synthetic_acceptance_rates "
            "and synthetic_acceptance_length"
        )
    if length is not None and not length <= k + 1:
        raise ConfigurationError(
            f"{what}: synthetic_acceptance_length {length}, at most num_speculative_tokens + 1 = "
            f"{k + 1} was wanted"
        )
    falls = all(0.0 <= b <= a <= 1.0 for a, b in itertools.pairwise((1.0, *rates)))
    if rates and (len(rates) != k or not falls):
        raise ConfigurationError(
            f"{what}: synthetic_acceptance_rates {list(rates)}, wanted {k} numbers in [0, 1] "
            "that never rise"
        )


def _check_batch_sizes(table: Sequence[tuple[int, int, int]], what: str) -> None:
    end = 0
    for first, last, k in table:
        row = f"[{first}, {last}, {k}]"
        if not (1 <= first <= last and k >= 0):
            raise ConfigurationError(
                f"{what}: num_speculative_tokens_per_batch_size has {row}, wanted [from, to, K] "
                "with 1 <= from <= to and K >= 0"
            )
        if first <= end:
            raise ConfigurationError(
                f"{what}: num_speculative_tokens_per_batch_size has {row} after a range up to "
                f"{end}; ranges in order and apart were wanted"
            )
        end = last


def build(
    model: type[ModelT],
    values: Mapping[str, Any],
    what: str = "",
    spell: Callable[[str], str] = str,
    *,
    from_text: bool = False,
) -> ModelT:
    """Validate `values` into `model`, turning every complaint into one ConfigurationError.

    Args:
        what: where the values came from, put before the complaints.
        spell: turns a field's name into what the user typed, such as a flag.
        from_text: values may be text that has yet to be read as numbers, as flags' are.
    """
    try:
        return model.model_validate(dict(values), strict=False if from_text else None)
    except ValidationError as error:
        details = error.errors(include_url=False)
        complaints = [_complaint(detail, model, spell) for detail in details]
        prefix = f"{what}: " if what else ""
        raise ConfigurationError(prefix + "; ".join(complaints)) from error


def _complaint(detail: ErrorDetails, model: type[BaseModel], spell: Callable[[str], str]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *parents, key = map(str, detail["loc"])
        known = _model_at(model, parents).model_fields
        return f"unknown key {quoted(name)}{did_you_mean(key, known)}"
    if detail["type"] == "missing":
        return f"{spell(name)}: missing"
    wanted = detail["msg"].removeprefix("Input should be ")
    hint = ""
    if detail["type"] == "literal_error":
        hint = did_you_mean(str(detail["input"]), re.findall(r"'([^']+)'", wanted))
    return f"{spell(name)}: found {quoted(detail['input'])}, wanted {wanted}{hint}"


def _model_at(model: type[BaseModel], path: Iterable[str]) -> type[BaseModel]:
    """Follow fields down to the model whose key was wrong."""
    for name in path:
        annotation = model.model_fields[name].annotation
        models = [
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if not models:
            return model
        model = models[0]
    return model


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def field_docs(model: type) -> dict[str, str]:
    """Return the string under each field of a configuration model or dataclass: its help text."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base in (BaseModel, object):
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
