"""The page /console in a real browser, over a running pair. `make console-check`.

Needs the `console` extra (playwright) and a Chromium: SPECSERVE_CHROMIUM names it, else the one on
PATH is taken. SPECSERVE_SCREENSHOTS names a folder that pictures are written to;
SPECSERVE_CONSOLE_URL a gateway to look at in place of a toy pair.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.tools.local import PairSpec, run_pair

playwright = pytest.importorskip("playwright.sync_api", reason="the `console` extra is missing")
pytestmark = pytest.mark.slow

TARGET = "toy:vocab_size=257,seed=7,order=8,step_ms=8"
DRAFT = "toy:vocab_size=257,seed=7,order=8,noise=0.7,noise_seed=1"
ORIGINS = {"accepted", "recovered", "bonus", "plain"}
WIDE, NARROW = {"width": 1200, "height": 1000}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway."""
    given = os.environ.get("SPECSERVE_CONSOLE_URL")
    if given:
        yield given
        return
    spec = PairSpec(TARGET, DRAFT, speculative_config='{"num_speculative_tokens": 3}')
    with run_pair(spec) as pair:
        yield f"http://{pair.gateways[0].address}"


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[playwright.Browser]:
    """A Chromium; its absence fails, for whoever calls this verb wants to know.

    After the gateway: playwright keeps an event loop running in this thread, beside which no other
    one starts.
    """
    path = os.environ.get("SPECSERVE_CHROMIUM") or shutil.which("chromium")
    assert path, "no Chromium on PATH; name one by SPECSERVE_CHROMIUM"
    with playwright.sync_playwright() as runner:
        chromium = runner.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Reader:
    """Somebody with the page open."""

    def __init__(self, browser: playwright.Browser, url: str, **options: object) -> None:
        self.complaints: list[str] = []
        self.page = browser.new_page(**{"viewport": WIDE, "color_scheme": "light", **options})
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._refuse_other_hosts)
        self.url = url
        self.page.goto(f"{url}/console")
        playwright.expect(self.page.locator("#served")).to_contain_text("K ")

    def ask(self, *, button: str = "#ask-button", tokens: int = 60) -> None:
        """Ask what the page suggests, by a button, and wait for the end."""
        self.page.fill("#max-tokens", str(tokens))
        self.page.click(button)
        playwright.expect(self.page.locator("#waterfall .round").first).to_be_visible(
            timeout=60_000
        )
        playwright.expect(self.page.locator("#stop-button")).to_be_disabled(timeout=60_000)

    def wait_for_rounds(self) -> None:
        """Wait until the request's rounds are drawn."""
        first = self.page.locator("#waterfall .round").first
        playwright.expect(first).to_be_visible(timeout=60_000)

    def picture(self, name: str) -> None:
        """Write a picture of the whole page, where they are wanted."""
        if folder := os.environ.get("SPECSERVE_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"console-{name}.png", full_page=True)

    def close(self) -> None:
        """Leave; nothing may have been complained of."""
        self.page.close()
        assert self.complaints == []

    def _note(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _refuse_other_hosts(self, request: playwright.Request) -> None:
        if not request.url.startswith(self.url):
            self.complaints.append(f"asked another host: {request.url}")


@pytest.fixture
def reader(browser: playwright.Browser, url: str) -> Iterator[Reader]:
    """A reader on a wide, light screen."""
    somebody = Reader(browser, url)
    yield somebody
    somebody.close()


def classes(reader: Reader) -> list[str]:
    """Return the origin of each token shown, in order."""
    found = reader.page.locator(".text .token").evaluate_all("all => all.map(e => e.className)")
    return [next(iter(ORIGINS & set(name.split()))) for name in found]


def test_tokens_come_coloured_by_origin_and_tell_of_themselves(reader: Reader) -> None:
    reader.ask()
    shown = classes(reader)
    legend = reader.page.locator("#legend .token").all_inner_texts()

    assert 0 < len(shown) <= 60
    assert shown[0] == "plain", "the prompt's round has no draft"
    assert "accepted" in shown
    assert set(legend) == ORIGINS
    colours = {
        name: reader.page.locator(f"#legend .token.{name}").evaluate(
            "e => getComputedStyle(e).backgroundColor + getComputedStyle(e).borderBottomStyle"
        )
        for name in ORIGINS
    }
    assert len(set(colours.values())) == len(ORIGINS), "colour and line tell them apart"

    reader.page.locator(".text .token").nth(shown.index("accepted")).hover()
    details = reader.page.locator("#token").inner_text()
    assert re.search(r"came from\s+accepted", details)
    assert re.search(r"probability under the target\s+[01]\.\d+", details)
    assert re.search(r"draft\s+\S+", details)
    reader.picture("ask")


def test_keyboard_alone_reaches_every_token(reader: Reader) -> None:
    reader.page.focus("#prompt")
    reader.page.fill("#max-tokens", "12")
    reader.page.focus("#ask-button")
    reader.page.keyboard.press("Enter")
    reader.wait_for_rounds()
    reader.page.locator(".text .token").first.focus()
    reader.page.keyboard.press("ArrowRight")
    reader.page.keyboard.press("ArrowRight")
    assert reader.page.evaluate("document.activeElement.dataset.index") == "2"
    assert "place" in reader.page.locator("#token").inner_text()
    reader.page.keyboard.press("End")
    last = reader.page.locator(".text .token").count() - 1
    assert reader.page.evaluate("document.activeElement.dataset.index") == str(last)


def test_waterfall_shows_where_each_round_went(reader: Reader) -> None:
    reader.ask()
    rounds = reader.page.locator("#waterfall .round")
    said = rounds.evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    emitted = sum(int(re.search(r"\+(\d+)", text)[1]) for text in said)

    assert emitted == len(classes(reader))
    assert reader.page.locator("#waterfall .bar.verify").count() == rounds.count()
    assert reader.page.locator("#waterfall .bar.draft").count() > 0
    assert reader.page.locator("#k-chart .step").count() == rounds.count()
    note = reader.page.locator("#waterfall-note").inner_text()
    assert f"{rounds.count()} rounds" in note
    assert "verify" in note
    assert "first_round: 1" in reader.page.locator("#k-note").inner_text()


def test_compare_states_that_both_are_equal(reader: Reader) -> None:
    reader.ask(button="#compare-button")
    verdict = reader.page.locator("#equality").inner_text()
    assert verdict.startswith("Equal, token for token")
    assert reader.page.locator(".answer").count() == 2
    texts = reader.page.locator(".answer .text").all_inner_texts()
    assert texts[0] == texts[1] != ""
    assert "accepted" in classes(reader)
    reader.picture("compare")


def test_pool_is_live(reader: Reader) -> None:
    reader.ask()
    playwright.expect(reader.page.locator("#recent tbody tr").first).to_be_visible()
    roles = reader.page.locator("#replicas tbody tr td:first-child").all_inner_texts()
    assert {"draft", "target"} <= set(roles)
    playwright.expect(reader.page.locator("#pool-figures")).to_contain_text("draft tokens accepted")
    playwright.expect(reader.page.locator("#positions tbody tr")).not_to_have_count(0)
    playwright.expect(reader.page.locator("#pool-k-chart .step.drafted")).not_to_have_count(0)
    playwright.expect(reader.page.locator("#pool-k-note")).to_contain_text("first_round: ")
    reader.page.locator("#recent tbody button").first.click()
    playwright.expect(reader.page.locator("#waterfall .round").first).to_be_visible()


def test_what_is_wrong_is_said_and_the_next_request_works(reader: Reader) -> None:
    reader.page.fill("#prompt", "Hello")
    reader.page.fill("#seed", "1" + 30 * "0")
    with reader.page.expect_response("**/v1/chat/completions") as answer:
        reader.page.click("#ask-button")
    assert answer.value.status == 400
    playwright.expect(reader.page.locator("#problem")).to_contain_text("seed")
    # The browser itself notes every answer that is no success.
    reader.complaints = [text for text in reader.complaints if "400" not in text]
    reader.page.fill("#seed", "7")
    reader.ask()
    playwright.expect(reader.page.locator("#problem")).to_be_hidden()


def test_dark_and_narrow_are_readable(browser: playwright.Browser, url: str) -> None:
    reader = Reader(browser, url, viewport=NARROW, color_scheme="dark")
    reader.ask()
    assert reader.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert reader.page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    ), "nothing to scroll sideways"
    assert contrast_of_text(reader, ".text .token.accepted") >= 4.5
    assert contrast_of_text(reader, ".note") >= 4.5
    reader.picture("dark-narrow")
    reader.page.click("#theme")
    assert reader.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert contrast_of_text(reader, ".text .token.accepted") >= 4.5
    assert contrast_of_text(reader, ".note") >= 4.5
    reader.close()


def contrast_of_text(reader: Reader, selector: str) -> float:
    """Return the contrast of text to what is behind it (WCAG 2, 1 to 21)."""
    colours = reader.page.locator(selector).first.evaluate(
        """element => {
          const colour = getComputedStyle(element).color;
          let behind = element;
          while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') {
            behind = behind.parentElement;
          }
          return [colour, getComputedStyle(behind).backgroundColor];
        }"""
    )
    light = sorted(map(luminance, colours))
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
