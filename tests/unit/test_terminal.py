"""What the command line writes: colours by origin, progress, tables."""

import io

from specserve.tools.chat.painter import ORIGIN_COLOURS, Painter
from specserve.tools.chat.stream import StreamedToken
from specserve.tools.demo import Answer, Comparison, report, shipped_prompts
from specserve.tools.terminal import RESET, Progress, human_bytes, table, wants_colour


def coloured(origin, text):
    return f"{ORIGIN_COLOURS[origin]}{text}{RESET}"


def test_each_token_has_the_colour_of_its_origin():
    painter = Painter(enabled=True)

    painted = painter.paint(
        "hello world", (StreamedToken(b"hello", "accepted"), StreamedToken(b" world", "recovered"))
    )

    assert painted == coloured("accepted", "hello") + coloured("recovered", " world")
    assert painter.counts == {"accepted": 1, "recovered": 1, "bonus": 0, "plain": 0}


def test_a_character_that_spans_chunks_is_coloured_by_its_first_token():
    """Text comes later than its tokens while a character is not whole."""
    painter = Painter(enabled=True)
    euro = "€".encode()

    assert painter.paint("", (StreamedToken(euro[:1], "accepted"),)) == ""
    painted = painter.paint("€!", (StreamedToken(euro[1:] + b"!", "bonus"),))

    assert painted == coloured("accepted", "€") + coloured("bonus", "!")


def test_tokens_without_text_are_skipped():
    """Special tokens are counted, and colour nothing."""
    painter = Painter(enabled=True)

    painted = painter.paint(
        "ab",
        (
            StreamedToken(b"a", "plain"),
            StreamedToken(b"<s>", "bonus"),
            StreamedToken(b"b", "accepted"),
        ),
    )

    assert painted == coloured("plain", "a") + coloured("accepted", "b")
    assert painter.counts["bonus"] == 1


def test_broken_text_does_not_lose_the_rest():
    """A byte that is no character shows as U+FFFD; what follows keeps its colour."""
    painter = Painter(enabled=True)

    painted = painter.paint(
        "\N{REPLACEMENT CHARACTER}x",
        (StreamedToken(b"\xff", "bonus"), StreamedToken(b"x", "plain")),
    )

    assert painted == coloured("bonus", "\N{REPLACEMENT CHARACTER}") + coloured("plain", "x")


def test_without_colour_the_text_is_untouched():
    painter = Painter(enabled=False)

    assert painter.paint("hi", (StreamedToken(b"hi", "plain"),)) == "hi"
    assert painter.counts["plain"] == 1


def test_no_color_is_honoured(monkeypatch):
    """https://no-color.org: any value that is not empty switches colours off."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


def test_progress_without_a_terminal_is_a_line_at_the_start_and_the_end():
    """A log file gets few lines, and the last one says that it is done."""
    stream = io.StringIO()
    progress = Progress(stream)

    for percent in range(101):
        progress("fetching", percent / 100)
    progress("fetching", 1.0)
    progress.close()

    assert stream.getvalue().splitlines() == ["fetching:   0 %", "fetching: 100 %"]


def test_a_table_lines_up():
    assert table(("a", "long"), [("xyz", "1")]) == "a    long\n---  ----\nxyz  1"


def test_sizes_are_readable():
    assert [human_bytes(n) for n in (5, 2_500, 269_100_000, 3e12)] == [
        "5 B",
        "2.5 kB",
        "269.1 MB",
        "3.0 TB",
    ]


def test_six_prompts_of_six_kinds_are_shipped():
    kinds = [prompt.kind for prompt in shipped_prompts()]

    assert kinds == ["chat", "code", "maths", "summary", "translation", "question"]


def test_the_report_has_a_row_per_prompt_and_the_medians():
    """Tokens per second leave the first token out, whose time is the prompt's."""
    on = Answer("same", num_tokens=11, first_token_s=1.0, decode_s=1.0, speculation=None)
    off = Answer("same", num_tokens=11, first_token_s=1.0, decode_s=2.0, speculation=None)

    text = report([Comparison("chat", on, off), Comparison("code", on, off)])

    rows = [line.split() for line in text.splitlines()]
    assert ["chat", "10.0", "5.0", "2.00x", "-", "-", "yes"] in rows
    assert ["median", "10.0", "5.0", "2.00x", "-", "-"] in rows
