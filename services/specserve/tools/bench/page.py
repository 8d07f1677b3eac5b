"""One self-contained HTML page: no script, no font and no picture from anywhere else.

Knows markup and colours, light and dark; knows nothing of what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --ground: #fff; --raised: #f4f5f7; --ink: #1b1f24; --faint: #59636e; --rule: #d5dae0;
  --good: #116329; --bad: #a40e26; --unsure: #7d4e00;
  --c0: #0b62c4; --c1: #b35900; --c2: #1a7f37; --c3: #8250df; --c4: #a8296b; --c5: #4a5560; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #12161b; --raised: #1b2128; --ink: #e6eaef; --faint: #9aa5b1; --rule: #343c46;
  --good: #57c26e; --bad: #ff8080; --unsure: #e0a040;
  --c0: #6cb2ff; --c1: #f0a04b; --c2: #5fc878; --c3: #b79cff; --c4: #f28cbf; --c5: #a9b4bf; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem 1rem 3rem; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
.faint, figcaption { color: var(--faint); font-size: .87rem; }
code { font: .87em ui-monospace, monospace; background: var(--raised); padding: .1em .3em;
  border-radius: 4px; overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: 1rem; font-weight: 600;
  border: 2px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .unsure { color: var(--unsure); }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .2rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; color: var(--faint); }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.text td { white-space: normal; min-width: 6rem; overflow-wrap: anywhere; }
.text td:first-child { overflow-wrap: normal; }
.plots { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figcaption { padding: 0 .35rem; }
figure { margin: 0; background: var(--raised); border-radius: 8px; padding: .6rem;
  max-width: 36rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg .title { font-size: 12px; font-weight: 600; fill: var(--ink); }
svg .value { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .tick { font-size: 9.5px; text-anchor: middle; }
svg .axis { stroke: var(--rule); stroke-width: 1; }
svg .one { stroke: var(--faint); stroke-width: 1; }
svg .limit { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 4 3; }
""" + "".join(
    f".f{i} {{ fill: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); stroke-width: 2; }}\n"
    for i in range(6)
)


def page(title: str, body: Sequence[str]) -> str:
    """Return a whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    *,
    is_text: bool = False,
) -> str:
    """Return a table that scrolls by itself where it is too wide. Cells are escaped.

    Args:
        is_text: cells are sentences, which may wrap, rather than numbers.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="text"' if is_text else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def plots(drawn: Sequence[tuple[str, str]]) -> str:
    """Lay plots out beside one another.

    Args:
        drawn: (SVG, caption) of each; an empty caption is left out.
    """
    figures = "".join(
        f"<figure>{svg}"
        + (f"<figcaption>{escape(text)}</figcaption>" if text else "")
        + "</figure>"
        for svg, text in drawn
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def heading(level: int, text: str) -> str:
    """Return a heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; nothing for an empty text."""
    style = f' class="{kind}"' if kind else ""
    return f"<p{style}>{escape(text)}</p>" if text else ""


def verdict(text: str) -> str:
    """Return a verdict, coloured and in words."""
    kind = {"enable": "good", "keep target-only": "bad"}.get(text, "unsure")
    return f'<p><span class="verdict {kind}">{escape(text)}</span></p>'
