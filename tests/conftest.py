"""What all tests share: nothing but how hypothesis draws."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import specserve

KNOWS_RAY = ("app", "deployment", "serve_policy", "one_machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Load the project's modules before tests that draw.

    Hypothesis draws from the constants of the project's modules, of those that are loaded. One that
    a thread of an earlier test loads in between would change what a seed draws.
    """
    if any(item.get_closest_marker("hypothesis") for item in items):
        for module in pkgutil.walk_packages(specserve.__path__, "specserve."):
            if module.name.rpartition(".")[2] not in KNOWS_RAY and not module.name.endswith(
                "__main__"
            ):
                importlib.import_module(module.name)
