"""The toy pair under Ray Serve, started by `specserve serve` as a user would."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from helpers.processes import CommandLine
from specserve.tools.held_port import HeldPort

TARGET = "toy:vocab_size=96,seed=7,step_ms=4"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
START_TIMEOUT_S = 300
PROMPT = {"prompt": "hello", "temperature": 0, "ignore_eos": True}

Chunk = tuple[float, dict[str, Any]]
"""(seconds since the request, the chunk)."""


class Served:
    """A running `specserve serve`, what it said about itself, and a client of it."""

    def __init__(self, *flags: str, api_key: str | None = None) -> None:
        self._port = HeldPort()
        config = json.dumps({"model": DRAFT})
        words = [
            "serve",
            TARGET,
            f"--port={self._port.number}",
            "--speculative-config",
            config,
            *flags,
        ]
        self.command = CommandLine(words)
        ready = self.command.wait_event("ready", START_TIMEOUT_S)
        self.url = str(ready["address"])
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.client = httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.client.close()
        self.command.kill()
        self._port.release()

    def replica(self, role: str) -> tuple[int, str]:
        """Return pid and address as printed for people, of the first one."""
        return self.replicas(role)[0]

    def replicas(self, role: str) -> list[tuple[int, str]]:
        """Return pid and address of each as printed for people."""
        pattern = re.compile(rf"{role} +pid (\d+) +grpc (\S+)")
        found = [match for line in self.command.output if (match := pattern.search(line))]
        assert found, self.command.output
        return [(int(match[1]), match[2]) for match in found]

    def complete(self, **fields: Any) -> Any:
        """Return a whole completion."""
        answer = self.client.post("/v1/completions", json={**PROMPT, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **fields: Any) -> Iterator[Chunk]:
        """Yield the chunks of a streamed completion."""
        started = time.monotonic()
        body = {**PROMPT, "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield time.monotonic() - started, json.loads(line.removeprefix("data: "))


def text_of(chunks: Sequence[Chunk]) -> str:
    """Join the text of a stream's chunks."""
    return "".join(choice["text"] for _, chunk in chunks for choice in chunk["choices"])
