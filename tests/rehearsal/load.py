"""Streams that are kept going while something happens to the cluster. Knows HTTP alone."""

from __future__ import annotations

import json
import threading

import httpx


class Load:
    """Streams that are kept going; every one is compared with the first of its prompt."""

    def __init__(self, url: str, num_tokens: int = 160) -> None:
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._num_tokens = num_tokens
        self._right: dict[str, str] = {}
        self._wanted = 0
        self._threads: list[threading.Thread] = []
        self.num_done = 0
        self.failures: list[str] = []
        self.num_draft_tokens = 0

    def keep(self, number: int) -> None:
        """Have so many streams run at once from now on; more than that end as they end."""
        self._wanted = number
        while len(self._threads) < number:
            thread = threading.Thread(target=self._run, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let the streams end."""
        self._wanted = 0
        for thread in self._threads:
            thread.join(120)
        self._client.close()

    def _run(self, index: int) -> None:
        while index < self._wanted:
            prompt = f"prompt {index}"
            try:
                text = self._complete(prompt)
            except (httpx.HTTPError, AssertionError, KeyError) as error:
                self.failures.append(f"{prompt}: {error!r}")
                continue
            if self._right.setdefault(prompt, text) != text:
                self.failures.append(f"{prompt}: another text")
            self.num_done += 1
        del self._threads[index:]

    def _complete(self, prompt: str) -> str:
        body = {
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "speculation_metrics": "summary",
        }
        text, last = "", {}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {answer.read().decode()[:300]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    assert "error" not in last, last
                    text += "".join(choice["text"] for choice in last["choices"])
                    metrics = last.get("metrics") or {}
                    figures = metrics.get("speculative_decoding") or {}
                    self.num_draft_tokens += figures.get("num_draft_tokens", 0)
        assert last, "no chunk came"
        return text
