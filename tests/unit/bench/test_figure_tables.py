"""Single figures as tables."""

from specserve.tools.bench.figure_tables import overlap, tables_of


def test_overlap_figures_make_one_row_a_pair_of_cost_and_acceptance():
    """Four figures a cell, of which three are shown; a figure that is missing leaves a dash."""
    figures = {
        f"overlap.c{cost}.a0.85.{rule}.{batch}.{name}": value
        for cost in ("0.1", "0.25")
        for rule in ("greedy", "coupled")
        for batch in (1, 8)
        for name, value in (
            ("off_tokens_per_s", 40.0),
            ("ratio", 1.2 + batch),
            ("chosen_share", 0.9),
            ("hidden_share", 0.5),
        )
    }
    del figures["overlap.c0.25.a0.85.coupled.8.ratio"]
    shown = overlap(figures)
    alone, many = "2.20 (0.90, 0.50)", "9.20 (0.90, 0.50)"

    assert shown.header[2:] == ("greedy, 1", "greedy, 8", "coupled, 1", "coupled, 8")
    assert shown.rows == (
        ("0.1", "0.85", alone, many, alone, many),
        ("0.25", "0.85", alone, many, alone, "-"),
    )


def test_every_other_figure_keeps_its_name():
    """What is no figure of the overlap suite stands in a table of names and values."""
    shown = tables_of({"steps.5.ms": 10.25, "overlap.c0.1.a0.6.greedy.1.ratio": 1.0})

    assert [len(table.rows) for table in shown] == [1, 1]
    assert shown[1].rows == (("steps.5.ms", "10.25"),)
    assert tables_of({}) == []
