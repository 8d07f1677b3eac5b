"""Single figures as tables: those of the overlap suite as one row a pair of cost and acceptance.

Pure: names and values in, text cells out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specserve.tools.bench.rows import Table

_OVERLAP = re.compile(
    r"overlap\.c(?P<cost>[\d.]+)\.a(?P<acceptance>[\d.]+)"
    r"\.(?P<rule>\w+)\.(?P<batch>\d+)\.(?P<name>\w+)"
)


def tables_of(figures: Mapping[str, float]) -> list[Table]:
    """Lay out every figure of a record, in as few rows as can be read."""
    others = {name: value for name, value in figures.items() if not _OVERLAP.fullmatch(name)}
    tables = []
    if len(others) < len(figures):
        tables.append(overlap(figures))
    if others:
        rows = tuple((name, f"{value:.4g}") for name, value in others.items())
        tables.append(Table("Figures", ("figure", "value"), rows))
    return tables


def overlap(figures: Mapping[str, float]) -> Table:
    """Tokens/s with the outcome cache over those without, how often it was at work, and the share
    of draft time it hid there.
    """
    columns: dict[str, None] = {}
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for name, value in figures.items():
        if (found := _OVERLAP.fullmatch(name)) is None:
            continue
        column = f"{found['rule']}, {found['batch']}"
        columns[column] = None
        row = cells.setdefault((found["cost"], found["acceptance"]), {})
        row.setdefault(column, {})[found["name"]] = value
    rows = tuple(
        (cost, acceptance, *(_cell(row.get(column, {})) for column in columns))
        for (cost, acceptance), row in cells.items()
    )
    return Table(
        "Drafting ahead: tokens/s over those without it (share of rounds that do, of their draft "
        "time hidden), by rule and sessions",
        ("draft / target", "acceptance", *columns),
        rows,
    )


def _cell(values: Mapping[str, float]) -> str:
    if "ratio" not in values:
        return "-"
    shares = (values.get(name, 0.0) for name in ("chosen_share", "hidden_share"))
    return f"{values['ratio']:.2f} ({', '.join(f'{share:.2f}' for share in shares)})"
