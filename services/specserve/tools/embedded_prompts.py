"""Makes the prompts that the embedded draft's training text answers: `python -m` this module.

Kinds of requests in wordings of our own, filled from freely licensed text. The same seed and
packages give the same file. Knows sources and templates; knows no model.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specserve.tools import prompt_templates as words
from specserve.tools.prompt_sources import Sources, read_sources

_FIELD = re.compile(r"\{(\w+)\}")

_MIX = "facts=20,sums=19,chat=22,translation=19,summary=12,passages=4"
"""Groups of a kind in a block; a group of `passages` or `reports` is two requests on one text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn."""

    kind: str
    """What is asked for."""
    prompt: str
    """The user's words."""


class PromptMaker:
    """Draws prompts."""

    def __init__(self, sources: Sources, seed: int) -> None:
        self._sources, self._random = sources, random.Random(seed)

    def make(self, num_prompts: int, mix: dict[str, int]) -> list[Prompt]:
        """Return `num_prompts` prompts; each block holds `mix[kind]` groups of a kind."""
        makers: dict[str, Callable[[], list[str]]] = {
            "facts": lambda: [self._fill(self._random.choice(words.FACTS))],
            "sums": lambda: [self._sum()],
            "chat": lambda: [self._fill(self._random.choice(words.CHAT))],
            "translation": lambda: [self._translation()],
            "summary": lambda: [self._summary()],
            "passages": self._passages,
            "reports": self._reports,
        }
        prompts: list[Prompt] = []
        while len(prompts) < num_prompts:
            block = [kind for kind, count in mix.items() for _ in range(count)]
            self._random.shuffle(block)
            for kind in block:
                prompts += [Prompt(kind, text) for text in makers[kind]()]
        return prompts[:num_prompts]

    def _fill(self, template: str) -> str:
        return _FIELD.sub(lambda match: self._word(match[1]), template)

    def _word(self, name: str) -> str:
        draw, sources = self._random, self._sources
        kind = name.rstrip("2")
        if kind == "person":
            return draw.choice(sources.people).name
        if kind == "place":
            place = draw.choice(sources.places)
            return place.split(",")[0] if draw.random() < 0.7 else place
        if kind == "thing":
            return draw.choice(sources.things).name
        if kind == "saying":
            return draw.choice(sources.sayings)
        if kind == "short":
            return self._cut(draw.choice(sources.news), 500)
        if kind == "year":
            return str(draw.randint(1900, 2019))
        if kind == "small":
            return str(draw.randint(2, 9))
        if kind == "number":
            return str(draw.randint(10, 99))
        return draw.choice(words.CHOICES[kind])

    def _sum(self) -> str:
        draw = self._random
        a, b = draw.sample(words.CHOICES["name"], 2)
        values = {
            "a": a,
            "b": b,
            "n1": str(draw.choice([12, 15, 18, 20, 24, 25, 30, 36, 40, 48, 60, 72, 80])),
            "n2": str(draw.randint(2, 11)),
            "n3": str(draw.randint(2, 8)),
            "n4": str(draw.choice([100, 120, 150, 200, 240, 300, 360, 450, 500, 600])),
            "n5": str(draw.randint(3, 12)),
            "p": str(draw.choice([5, 10, 20, 25, 30, 40, 50, 75])),
            "things": draw.choice(words.CHOICES["things"]),
            "thing": draw.choice(["shirt", "book", "ticket", "lamp", "bike", "cake", "chair"]),
        }
        chosen = [draw.choice(words.SUMS)]
        text = _FIELD.sub(lambda match: values[match[1]], chosen[0])
        return text if draw.random() < 0.8 else text + " Explain step by step."

    def _translation(self) -> str:
        draw = self._random
        if draw.random() < 0.4:
            text = self._german(draw.choice(words.GERMAN_SENTENCES))
            text = text[0].upper() + text[1:]
        else:
            text = draw.choice(self._sources.german)
            if draw.random() < 0.5:
                # Sets for machine translation are split at punctuation.
                text = re.sub(r"([.,!?:;„“\"])", r" \1 ", text)
                text = re.sub(r" +", " ", text).strip()
        return self._template(words.TRANSLATION, text)

    def _german(self, template: str) -> str:
        pattern, draw = _FIELD, self._random
        while pattern.search(template):
            template = pattern.sub(
                lambda match: draw.choice(words.GERMAN_WORDS[match[1]]), template, count=1
            )
        return template

    def _template(self, templates: tuple[str, ...], text: str) -> str:
        """Fill one, the first of them in a third of all cases."""
        draw = self._random
        chosen = templates[0] if draw.random() < 0.35 else draw.choice(templates)
        return chosen.replace("{text}", text)

    def _cut(self, text: str, size: int) -> str:
        """Cut at the last sentence end before `size` characters."""
        if len(text) <= size:
            return text
        end = text.rfind(". ", 0, size)
        return text[: end + 1] if end > size // 3 else text[:size]

    def _summary(self) -> str:
        draw, sources = self._random, self._sources
        size = draw.choice([500, 700, 900, 1200, 1800])
        roll = draw.random()
        if roll < 0.55:
            text = self._cut(draw.choice(sources.news), size)
        elif roll < 0.8:
            text = self._cut(draw.choice(sources.prose), size)
        else:
            entry = draw.choice(sources.entries)
            text = self._cut(f"{entry.name}: {entry.text}", size)
        return self._template(words.SUMMARY, text)

    def _reports(self) -> list[str]:
        """Two requests on several news reports: long prompts."""
        draw, sources = self._random, self._sources
        reports = draw.sample(sources.news, draw.randint(2, 3))
        text = "\n\n".join(self._cut(report, 1300) for report in reports)
        first = self._template(words.SUMMARY, text)
        question = draw.choice(words.PASSAGE_QUESTIONS).replace("{name}", text.split(" ", 3)[2])
        return [first, f"{first}\n{question}"]

    def _passages(self) -> list[str]:
        """Two questions on the same passages, one after the other."""
        draw, sources = self._random, self._sources
        passages, names = [], []
        for _ in range(draw.randint(2, 3)):
            roll = draw.random()
            if roll < 0.45:
                entry = draw.choice(sources.entries)
                passages.append(f"{entry.name} {self._cut(entry.text, 600)}")
                names.append(entry.name)
            elif roll < 0.7:
                person = draw.choice(sources.people)
                others = "; ".join(f"{p.name}: {p.text}" for p in draw.sample(sources.people, 3))
                passages.append(f"{person.name} {person.text}. {others}.")
                names.append(person.name)
            else:
                passages.append(self._cut(draw.choice(sources.news), 700))
                names.append(passages[-1].split(" ", 3)[2])
        text = "\n".join(passages)
        return [
            f"{text}\n{question.replace('{name}', draw.choice(names))}"
            for question in draw.sample(words.PASSAGE_QUESTIONS, 2)
        ]


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="folder with the unpacked Debian packages")
    parser.add_argument("news", type=Path, help="lee_background.cor of gensim's test data")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=6144)
    parser.add_argument("--mix", default=_MIX)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mix = {kind: int(count) for kind, _, count in (p.partition("=") for p in args.mix.split(","))}
    maker = PromptMaker(read_sources(args.packages, args.news), args.seed)
    prompts = maker.make(args.num_prompts, mix)
    with args.output.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            row = {"prompt": prompt.prompt, "kind": prompt.kind}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
