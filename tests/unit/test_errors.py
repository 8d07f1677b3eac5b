"""Errors cross processes whole: by pickle between Ray actors, by status code over gRPC."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from specserve import errors
from specserve.gateway import errors as gateway_errors
from specserve.rpc import status

SOURCES = Path(errors.__file__).parent
SAMPLES: dict[object, object] = {str: "seven", int: 7, float: 0.25}


def _defined(module: ModuleType) -> set[type[errors.SpecServeError]]:
    """Return the errors that a module defines, the base left out."""
    return {
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, errors.SpecServeError)
        and value is not errors.SpecServeError
        and value.__module__ == module.__name__
    }


ON_THE_WIRE = _defined(errors) | _defined(status)
HTTP_ONLY = _defined(gateway_errors)
"""The gateway raises and answers these itself; no other process sees them."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("short", "'short'"),
        (True, "true"),
        (None, "null"),
        (0.5, "0.5"),
        ("x" * 100, "'" + "x" * 100 + "'"),
        ("x" * 101, "'" + "x" * 100 + "'… (101 characters)"),
    ],
)
def test_a_quoted_value_is_short(value: object, message: str) -> None:
    """Text whole up to 100 characters; of anything longer the beginning."""
    assert errors.quoted(value) == message


def test_no_quoted_value_is_long() -> None:
    """Whatever it is, and however deep its parts lie; some numbers Python itself does not write."""
    deep = {"k" * 9999: ["v" * 9999] * 99}
    for value in (deep, [[10**4000]] * 9, "é" * 10**6, 10**4000, 10**5000, [10**5000]):
        assert len(errors.quoted(value)) < 150


def _sample(error: type[errors.SpecServeError]) -> errors.SpecServeError:
    """Make an error with a value of the right type for each field."""
    constructor = inspect.unwrap(error.__init__)
    hints = get_type_hints(constructor)
    names = list(inspect.signature(constructor).parameters)[1:]
    return error(*(SAMPLES[hints[name]] for name in names))


@pytest.mark.parametrize("error", sorted(ON_THE_WIRE | HTTP_ONLY, key=str))
def test_error_survives_pickling_with_its_fields_and_its_text(
    error: type[errors.SpecServeError],
) -> None:
    """Unpickling calls Class(*args): the class, every field and the text come back."""
    before = _sample(error)

    after = pickle.loads(pickle.dumps(before))  # noqa: S301  # what we pickled ourselves

    assert type(after) is type(before)
    assert vars(after) == vars(before)
    assert str(after) == str(before)
    assert str(after) not in {"", str(before.args)}, "the text is for people"


def test_every_error_has_a_status_code() -> None:
    """A handler may raise any of them: each has a row in rpc/status.py."""
    assert set(status.CODES) == ON_THE_WIRE
    assert all(code.value[0] != 0 for code in status.CODES.values()), "OK is no error"


def test_every_error_has_an_http_status() -> None:
    """The gateway answers each class by a row of its own; a RemoteError by the class it names."""
    without = {error for error in ON_THE_WIRE | HTTP_ONLY if not gateway_errors.is_mapped(error)}

    assert without == {status.RemoteError}


def test_no_other_module_defines_errors() -> None:
    """No module grows errors of its own that the tables could miss."""
    known = {error.__name__ for error in ON_THE_WIRE | HTTP_ONLY} | {"SpecServeError"}
    strays = [
        f"{path.relative_to(SOURCES)}: {node.name}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & known
        and node.name not in known
    ]
    assert not strays


def test_tree_in_the_docstring_is_complete() -> None:
    """The page a reader starts from shows every class, and no class that is gone."""
    tree = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    shown = {line.partition("── ")[2].split()[0] for line in tree}

    assert shown == {error.__name__ for error in _defined(errors)}
