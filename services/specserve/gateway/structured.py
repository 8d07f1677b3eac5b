"""The language that a body holds its text to, from the fields that may name one.

Knows the fields; what a grammar is, and whether it is one, is known to `grammar/`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from specserve.errors import InvalidRequest
from specserve.gateway.fields import GenerationFields, ResponseFormat, StructuredOutputs
from specserve.gateway.pair import ServedPair
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.lark import choice_grammar, json_grammar, lark_grammar, regex_grammar

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")

_Asked = tuple[str, str]
"""The field that asks, and its Lark grammar."""


async def wanted_grammar(
    body: GenerationFields, grammars: GrammarCompiler, pair: ServedPair, tenant_salt: bytes = b""
) -> str:
    """Return the Lark grammar that the text is held to, "" for none.

    It is compiled once here, in a worker thread, so that no other process sees a wrong one.

    Raises:
        InvalidRequest: the field at fault is named, with what is wrong with it.
    """
    asked = [*_asked(body)]
    if not asked:
        return ""
    field, grammar = asked[0]
    if len(asked) > 1:
        raise InvalidRequest(asked[1][0], f"not together with {field}: one language was wanted")
    if body.ignore_eos:
        raise InvalidRequest("ignore_eos", f"not together with {field}, whose text ends with EOS")
    if not pair.eos_token_ids:
        raise InvalidRequest(field, "the served model has no end-of-text token to end it with")
    if pair.rejection_sample_method == "synthetic":
        raise InvalidRequest(
            field,
            "this deployment accepts draft tokens by synthetic rates, for benchmarks, and holds no "
            "text to anything",
        )
    try:
        await asyncio.to_thread(grammars.compile, grammar, tenant_salt)
    except InvalidRequest as error:
        # A place in our wrapping of what they wrote would puzzle them.
        is_theirs = field.endswith("grammar")
        message = error.message if is_theirs else _PLACE.sub("", error.message)
        raise InvalidRequest(field, message) from None
    return grammar


def _asked(body: GenerationFields) -> Iterator[_Asked]:
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    if body.structured_outputs is not None:
        found = [*_of_outputs(body.structured_outputs)]
        if not found:
            raise InvalidRequest(
                "structured_outputs", "one of json, regex, choice, grammar, json_object was wanted"
            )
        yield from found
    if body.guided_json is not None:
        yield "guided_json", json_grammar("guided_json", body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", regex_grammar("guided_regex", body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", choice_grammar("guided_choice", body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", lark_grammar("guided_grammar", body.guided_grammar)


def _of_format(wanted: ResponseFormat) -> Iterator[_Asked]:
    schema, where = wanted.json_schema, "response_format.json_schema"
    if (schema is not None) != (wanted.type == "json_schema"):
        raise InvalidRequest(where, "goes with the type json_schema, and only with it")
    if schema is not None:
        yield f"{where}.schema", json_grammar(f"{where}.schema", schema.definition)
    elif wanted.type == "json_object":
        yield "response_format", json_grammar("response_format", _ANY_OBJECT)


def _of_outputs(wanted: StructuredOutputs) -> Iterator[_Asked]:
    base = "structured_outputs"
    _check_whitespace(base, wanted)
    schemas = {"json": wanted.json_schema, "json_object": wanted.json_object and _ANY_OBJECT}
    for name, schema in schemas.items():
        if schema is not None:
            yield (
                f"{base}.{name}",
                json_grammar(
                    f"{base}.{name}",
                    schema,
                    any_whitespace=not wanted.disable_any_whitespace,
                    whitespace_pattern=wanted.whitespace_pattern,
                ),
            )
    if wanted.regex is not None:
        yield f"{base}.regex", regex_grammar(f"{base}.regex", wanted.regex)
    if wanted.choice is not None:
        yield f"{base}.choice", choice_grammar(f"{base}.choice", wanted.choice)
    if wanted.grammar is not None:
        yield f"{base}.grammar", lark_grammar(f"{base}.grammar", wanted.grammar)


def _check_whitespace(base: str, wanted: StructuredOutputs) -> None:
    """Refuse what is said of JSON's whitespace where it would change nothing.

    Raises:
        InvalidRequest: the field at fault is named.
    """
    pattern, is_tight = wanted.whitespace_pattern, wanted.disable_any_whitespace
    if pattern is None and not is_tight:
        return
    field = f"{base}.{'disable_any_whitespace' if pattern is None else 'whitespace_pattern'}"
    if wanted.json_schema is None and wanted.json_object is None:
        raise InvalidRequest(field, "only together with json or json_object, whose texts have it")
    if pattern is not None and is_tight:
        raise InvalidRequest(field, "not together with disable_any_whitespace, which allows none")


_ANY_OBJECT: dict[str, object] = {"type": "object"}
