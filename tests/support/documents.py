"""What Markdown documents claim that can be looked up: links, anchors, files, commands and flags.

Knows Markdown as far as these documents use it, and GitHub's rule for anchors.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specserve import tools
from specserve.cli import COMMANDS
from specserve.tools.flags import Parser

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_METRIC = re.compile(r"\bspecserve_([a-z][a-z_]+[a-z])\b(?!\.)")
_ROOTS = ("services", "tests", "docs", "k8s", "deploy", "protos", ".ci")
_PATH = re.compile(rf"(?:{'|'.join(map(re.escape, _ROOTS))})/[\w./*{{}},-]*[\w*}}/]")
# Not the namespace of this name, nor a part of a path.
_SHELL_WORDS = re.compile(r"(?<![\w/.-])(?<!-n )(specserve|make) +([^\n|;&)]*)")


class Document:
    """One Markdown file."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._root = root
        self._text = path.read_text(encoding="utf-8")
        self._prose = _FENCE.sub("", self._text)

    def problems(self) -> Iterator[str]:
        """Yield everything that is claimed and is not so."""
        for problem in (*self._links(), *self._files(), *self._commands(), *self._metrics()):
            yield f"{self.path.relative_to(self._root)}: {problem}"

    def anchors(self) -> set[str]:
        """Return what a link behind # may name."""
        found: set[str] = set()
        for heading in _HEADING.findall(self._prose):
            slug = _slug(heading)
            number = 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
        return found

    def _links(self) -> Iterator[str]:
        for target in _LINK.findall(self._prose):
            if target.startswith(("https://", "mailto:")):
                continue
            if "://" in target:
                yield f"link {target}: https was wanted"
                continue
            name, _, anchor = target.partition("#")
            path = (self.path.parent / name).resolve() if name else self.path
            if not path.exists():
                yield f"link {target}: there is no such file"
            elif not path.is_relative_to(self._root):
                yield f"link {target}: outside of the repository"
            elif anchor and anchor not in Document(path, self._root).anchors():
                yield f"link {target}: no heading of this name"

    def _files(self) -> Iterator[str]:
        for code in _CODE.findall(self._prose):
            if code.startswith("kubectl"):
                continue  # deploy/NAME is a Deployment there
            for name in _PATH.findall(code):
                if not any(True for one in _braces(name) for _ in self._root.glob(one.rstrip("/"))):
                    yield f"`{name}`: there is no such file"

    def _commands(self) -> Iterator[str]:
        pieces = [block[0] for block in _FENCE.finditer(self._text)]
        pieces += _CODE.findall(self._prose)
        for piece in pieces:
            joined = re.sub(r"\\\n *", " ", piece)
            joined = re.sub(r"(^|\s)#\s.*$", "", joined, flags=re.MULTILINE)
            for program, rest in _SHELL_WORDS.findall(joined):
                check = _make_problems if program == "make" else _specserve_problems
                yield from check(_split(rest), self._root)

    def _metrics(self) -> Iterator[str]:
        known = _metric_names(self._root)
        for name in set(_METRIC.findall(self._text)):
            if not {name, re.sub(r"_(total|bucket|sum|count)$", "", name)} & known:
                yield f"metric specserve_{name}: there is no such metric"


@cache
def _metric_names(root: Path) -> frozenset[str]:
    """Return every word that code puts in quotes: metrics are among them, `specserve_` left out.

    Those that are put together, too: f"{PREFIX}_name", f"specserve_x_{name}".
    """
    texts = [path.read_text(encoding="utf-8") for path in (root / "services").rglob("*.py")]
    whole = {word for text in texts for word in re.findall(r'"(?:specserve_)?([a-z_]+)"', text)}
    prefixes = {word for text in texts for word in re.findall(r'"specserve_([a-z_]+)"', text)}
    names = {word for text in texts for word in re.findall(r'"\{_?PREFIX\}_?([a-z_]+)"', text)}
    joined = {f"{prefix}_{name}" for prefix in prefixes for name in names}
    starts = {word for text in texts for word in re.findall(r'f"specserve_([a-z_]+)_\{', text)}
    joined |= {f"{start}_{name}" for start in starts for name in whole}
    return frozenset(whole | names | joined)


def _specserve_problems(words: list[str], root: Path) -> Iterator[str]:
    if not words or words[0].startswith(("-", "<", "…")) or words[0] == "COMMAND":
        return
    for name in words[0].split("|"):
        if name not in COMMANDS:
            yield f"`specserve {words[0]}`: there is no such command"
            return
    known = _flags(words[0].split("|")[0])
    for word in words[1:]:
        flag = word.partition("=")[0].strip("[],.")
        if re.fullmatch(r"--[a-z][a-z0-9-]*", flag) and flag not in known:
            yield f"`specserve {words[0]} {flag}`: there is no such flag"


def _make_problems(words: list[str], root: Path) -> Iterator[str]:
    verbs = _verbs(root)
    for word in words:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break  # VARIABLE=value, or prose
        if word not in verbs:
            yield f"`make {word}`: there is no such verb"


@cache
def _flags(command: str) -> frozenset[str]:
    """Return a command's flags, as its own parser has them."""
    found = COMMANDS[command]
    if command == "distill":  # its parser takes torch along, seconds for a handful of flags
        sources = (Path(tools.__file__).parent / "distill").glob("*.py")
        text = "".join(path.read_text(encoding="utf-8") for path in sources)
        fields = re.findall(r"^    (\w+): ", text, re.MULTILINE)
        flags = {"--" + name.replace("_", "-") for name in fields}
        return frozenset(flags | set(re.findall(r'"(--[a-z-]+)"', text)))
    parser = Parser(command, "")
    getattr(importlib.import_module(f"specserve.tools.{found.module}"), found.add_arguments)(parser)
    return frozenset(parser._option_string_actions)


@cache
def _verbs(root: Path) -> frozenset[str]:
    text = (root / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quotation that goes on elsewhere
        return line.split()


def _slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = re.sub(r"[^\w\- ]", "", text.lower().replace("`", ""))
    return kept.replace(" ", "-")


def _braces(name: str) -> Iterator[str]:
    """Yield a{b,c}d as abd and acd."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        yield from _braces(name[: match.start()] + part + name[match.end() :])
