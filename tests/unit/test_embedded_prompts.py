"""The prompts of the embedded draft's text: same by seed, whole, of the kinds asked for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from specserve.tools.embedded_prompts import PromptMaker, main
from specserve.tools.prompt_sources import Entry, Sources, read_sources

REPORT = "The mayor of a small town opened a bridge on Monday. " * 12
GERMAN = "Das Werkzeug liegt auf dem Tisch. "
SOURCES = Sources(
    news=(REPORT, REPORT.replace("bridge", "school"), REPORT.replace("town", "port")),
    prose=("A handbook says what a tool does and when it is of use. " * 8,),
    german=("Der Hund liegt, wie immer, vor der Tür.", "Es regnet seit gestern Abend."),
    entries=(Entry("spool", "A reel, or the queue of a printer. " * 10),),
    people=tuple(Entry(f"Person {n}", "English painter (1800-1870)") for n in range(5)),
    things=(Entry("hammer", "a tool to drive nails"), Entry("kettle", "a pot to boil water in")),
    places=("Dublin, IE", "Kempten, DE"),
    sayings=("A stitch in time saves nine, but only if the thread is long enough for it.",),
)
MIX = {"facts": 3, "sums": 3, "chat": 4, "translation": 2, "summary": 2, "passages": 1}


def test_prompts_are_whole_and_repeat_by_seed() -> None:
    """The same seed gives the same prompts, kinds in their shares, every field filled in."""
    made = PromptMaker(SOURCES, 1).make(160, MIX)
    assert made == PromptMaker(SOURCES, 1).make(160, MIX)
    assert made != PromptMaker(SOURCES, 2).make(160, MIX)
    kinds = Counter(prompt.kind for prompt in made)
    assert kinds == {kind: 10 * n for kind, n in MIX.items()} | {"passages": 20}
    assert not [p.prompt for p in made if "{" in p.prompt or "}" in p.prompt]


def test_two_questions_stand_on_the_same_passages() -> None:
    """Requests on one text follow one another and begin alike, so that it is computed once."""
    for kind in ("passages", "reports"):
        made = PromptMaker(SOURCES, 3).make(20, {kind: 1})
        for one, other in zip(made[::2], made[1::2], strict=True):
            assert one.prompt != other.prompt
            assert one.prompt[:200] == other.prompt[:200]


def write_packages(root: Path) -> None:
    """Write a little of every package where `dpkg -x` would put it."""
    files = {
        "doc/debian-handbook/html/en-US/a.html": f"<p>{'Tools &amp; <b>files</b>. ' * 20}</p>",
        "doc/debian-handbook/html/de-DE/a.html": f"<p>{GERMAN * 3}</p>",
        "games/fortunes/wisdom": f"{'All is well that ends well. ' * 3}\n\t\t-- Someone\n%\nShort.",
        "games/fortunes/de/sprueche": "Wer zuletzt lacht, der lacht am besten.\n%\nNa ja.",
    }
    packed = {
        "doc/anarchism/markdown/a.md.gz": "See [this page](there) for *more*. " * 15,
        "dictd/wn.dict.dz": (
            "\nHypatia\n    n 1: Greek philosopher (370-415)\n"
            "anvil\n    n 1: a heavy block on which hot metals are shaped\n"
        ),
        "dictd/foldoc.dict.dz": f"\nspool\n\n   {'A queue of jobs. ' * 20}\n",
        "misc/cities.dat.gz": "Name        : Aberdeen\n Country    : UK\n",
    }
    for name, text in files.items():
        path = root / "usr" / "share" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    for name, text in packed.items():
        path = root / "usr" / "share" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))


def test_sources_are_read_from_unpacked_packages(tmp_path: Path) -> None:
    """Markup, signatures and links are gone; words and people come with what is said of them."""
    write_packages(tmp_path)
    news = tmp_path / "news.cor"
    news.write_text(f"{REPORT}\ntoo short\n")
    found = read_sources(tmp_path, news)
    assert found.news == (REPORT,)
    assert found.prose[0].startswith("Tools & files. Tools")
    assert found.prose[1].startswith("See this page for more.")
    assert "Wer zuletzt lacht, der lacht am besten." in found.german
    assert GERMAN.strip() in found.german
    assert found.sayings == (" ".join(["All is well that ends well."] * 3),)
    assert found.people == (Entry("Hypatia", "Greek philosopher (370-415)"),)
    assert [entry.name for entry in found.things] == ["anvil"]
    assert [entry.name for entry in found.entries] == ["spool"]
    assert found.places == ("Aberdeen, UK",)


def test_the_module_writes_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as a program it writes what `--prompts` of the distiller reads."""
    write_packages(tmp_path)
    (tmp_path / "news.cor").write_text(f"{REPORT}\n")
    output = tmp_path / "prompts.jsonl"
    words = [str(tmp_path), str(tmp_path / "news.cor"), "--output", str(output)]
    words += ["--num-prompts", "7", "--mix", "sums=2,summary=1"]
    monkeypatch.setattr("sys.argv", ["embedded_prompts", *words])
    main()
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert len(rows) == 7
    assert {row["kind"] for row in rows} == {"sums", "summary"}
