"""Reads freely licensed text out of unpacked Debian packages and one data file of gensim.

Which packages and under what licences: docs/embedded-draft.md. Knows files; knows no prompt.
"""

from __future__ import annotations

import gzip
import html
import re
from dataclasses import dataclass
from pathlib import Path

_TAG = re.compile(r"<[^>]+>")
_PARAGRAPH = re.compile(r"<p>(.*?)</p>|<div class=\"para\">(.*?)</div>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-ZÄÖÜ„\"'])")
_ENTRY = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, slots=True)
class Entry:
    """A word and what a dictionary says of it."""

    name: str
    """The headword."""
    text: str
    """Its definition, one line."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Text by kind, in file order."""

    news: tuple[str, ...]
    """Short news reports."""
    prose: tuple[str, ...]
    """Paragraphs of handbooks and essays."""
    german: tuple[str, ...]
    """German sentences."""
    entries: tuple[Entry, ...]
    """Articles of an encyclopaedic dictionary."""
    people: tuple[Entry, ...]
    """Persons and what they were."""
    things: tuple[Entry, ...]
    """Common nouns and their definitions."""
    places: tuple[str, ...]
    """Cities with their country."""
    sayings: tuple[str, ...]
    """Aphorisms, verses and anecdotes."""


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _gzipped(path: Path) -> str:
    with gzip.open(path) as file:
        return file.read().decode("utf-8", "replace")


def _html_paragraphs(folder: Path, pattern: str) -> list[str]:
    found = [
        _flat(html.unescape(_TAG.sub("", plain or styled)))
        for path in sorted(folder.glob(pattern))
        for plain, styled in _PARAGRAPH.findall(path.read_text("utf-8", "replace"))
    ]
    return [text for text in dict.fromkeys(found) if len(text) > 60]


def _fortunes(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix == "" and "art" not in path.name:
            text = path.read_text("utf-8", "replace")
            found += [_flat(piece.split("\n\t\t--")[0]) for piece in text.split("\n%\n")]
    return found


def _essays(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*.md.gz")):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _gzipped(path))
        found += [_flat(piece.replace("*", "")) for piece in text.split("\n\n")]
    return [text for text in found if len(text) > 200 and text[0].isalpha()]


def _dictionary(path: Path) -> list[Entry]:
    found = []
    for piece in _ENTRY.split(_gzipped(path)):
        name, _, text = piece.partition("\n")
        text = _flat(re.sub(r"[{}]", "", re.sub(r"<[^>]*>|\[[^\]]*\]", "", text)))
        if name and text:
            found.append(Entry(name.strip(), text))
    return found


def _sentences(texts: list[str]) -> list[str]:
    found = [s for text in texts for s in _SENTENCE_END.split(text)]
    return [s for s in dict.fromkeys(found) if 30 <= len(s) <= 260 and s[0].isupper()]


def read_sources(packages: Path, news: Path) -> Sources:
    """Read everything.

    Args:
        packages: folder that `dpkg -x` unpacked the Debian packages into.
        news: `lee_background.cor` of gensim's test data.
    """
    share = packages / "usr" / "share"
    handbook = share / "doc" / "debian-handbook" / "html"
    reference = share / "debian-reference"
    prose = _html_paragraphs(handbook, "en-US/*.html") + _html_paragraphs(reference, "ch*.en.html")
    prose += _essays(share / "doc" / "anarchism" / "markdown")
    german = _fortunes(share / "games" / "fortunes" / "de")
    german += _html_paragraphs(handbook, "de-DE/*.html")
    german += _html_paragraphs(reference, "ch*.de.html")
    words = _dictionary(share / "dictd" / "wn.dict.dz")
    dated = re.compile(r"n 1: ([^;]*?\(.*?\d{3,4}-\d{3,4}\))")
    people = [
        Entry(w.name, match[1])
        for w in words
        if w.name[0].isupper() and (match := dated.match(w.text))
    ]
    noun = re.compile(r"n 1: ([^;\[]{20,160})")
    things = [
        Entry(w.name, match[1].strip())
        for w in words
        if w.name.isalpha() and w.name.islower() and (match := noun.match(w.text))
    ]
    cities = re.findall(
        r"Name +: (.+)\n Country +: (.+)", _gzipped(share / "misc" / "cities.dat.gz")
    )
    entries = [
        e for e in _dictionary(share / "dictd" / "foldoc.dict.dz") if 250 <= len(e.text) <= 1500
    ]
    return Sources(
        news=tuple(line for line in news.read_text("utf-8").splitlines() if len(line) > 300),
        prose=tuple(text for text in prose if 250 <= len(text) <= 1800),
        german=tuple(_sentences(german)),
        entries=tuple(entries),
        people=tuple(people),
        things=tuple(things),
        places=tuple(f"{city.strip()}, {country.strip()}" for city, country in cities),
        sayings=tuple(
            text for text in _fortunes(share / "games" / "fortunes") if 60 <= len(text) <= 500
        ),
    )
