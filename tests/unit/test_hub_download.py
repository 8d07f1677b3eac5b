"""The hub's own client, over HTTP, against a stand-in for the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.hub import COMMIT, Hub, serving
from specserve.errors import ModelUnavailable
from specserve.model import embedded_sources
from specserve.model.embedded import pull_target, silent
from specserve.model.model_files import resolve_model_dir
from specserve.model.model_folder import read_marker, verify

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": bytes(range(256)) * 40,
    "pytorch_model.bin": b"a pickle, which nobody wants",
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own settings and cache out of it."""
    constants = embedded_sources.huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what HF_ENDPOINT would have set before the client was imported."""
    constants = embedded_sources.huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_the_embedded_target_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    with serving(Hub(embedded_sources.HUB_ID, FILES)) as hub:
        use(hub, monkeypatch)
        folder = pull_target(tmp_path / "cache", lambda step, share: steps.append(step), "hub")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert "pytorch_model.bin" not in names
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "downloading model.safetensors" in steps
    marker = read_marker(folder)
    assert marker is not None
    assert COMMIT in marker.source
    verify(folder)


def test_weights_that_are_not_what_the_hub_lists_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_with_another = Hub(embedded_sources.HUB_ID, FILES, lies_about="model.safetensors")
    with serving(hub_with_another) as hub:
        use(hub, monkeypatch)
        with pytest.raises(ModelUnavailable, match=r"model\.safetensors does not have the hub's"):
            pull_target(tmp_path / "cache", silent, "hub")


def test_a_model_is_named_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub("some/model", FILES)) as hub:
        use(hub, monkeypatch)
        folder = resolve_model_dir("some/model", None, trust_remote_code=False)
        assert (folder / "config.json").read_bytes() == b"{}"
        assert not (folder / "pytorch_model.bin").exists()
        assert not any("pytorch_model" in path for path in hub.asked)


def test_what_is_no_hub_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub("some/model", FILES, is_portal=True)) as hub:
        use(hub, monkeypatch)
        with pytest.raises(ModelUnavailable, match="some/model could not be fetched from the hub"):
            resolve_model_dir("some/model", None, trust_remote_code=False)
