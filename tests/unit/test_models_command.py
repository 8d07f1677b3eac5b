"""`specserve models pull --link-dir`: paths that a configuration can name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from specserve.config import SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.model import embedded
from specserve.tools import demo, serve
from specserve.tools.flags import Parser
from specserve.tools.models import EMBEDDED_DEFAULTS, link_pair, resolve_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return two directories of models in a cache, the draft's name a new one each version."""
    target, draft = tmp_path / "cache" / "target-model", tmp_path / "cache" / "draft-1a2b"
    for folder in (target, draft):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(folder.name)
    return target, draft


def test_pair_is_found_under_names_that_stay(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Also where the cache is mounted elsewhere, and again when the draft is a newer one."""
    target, draft = pair
    link_pair(target, draft, tmp_path / "cache")
    newer = draft.rename(draft.with_name("draft-3c4d"))

    link_pair(target, newer, tmp_path / "cache")
    mounted = (tmp_path / "cache").rename(tmp_path / "models")

    assert (mounted / "target" / "config.json").read_text() == "target-model"
    assert (mounted / "draft" / "config.json").read_text() == "draft-1a2b"
    assert (mounted / "draft").resolve().name == "draft-3c4d"


def test_what_is_no_link_of_ours_is_left_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "draft").write_text("mine")

    with pytest.raises(ConfigurationError, match="--link-dir: "):
        link_pair(*pair, tmp_path / "links")

    assert (tmp_path / "links" / "draft").read_text() == "mine"


def test_what_the_user_says_of_the_embedded_pair_wins_over_its_defaults(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    found = embedded.EmbeddedPair(target, draft)
    monkeypatch.setattr(embedded, "embedded_pair", lambda *_: found)
    plain = resolve_pair(None, None, None).speculative
    assert plain is not None
    assert {key: getattr(plain, key) for key in EMBEDDED_DEFAULTS} == EMBEDDED_DEFAULTS
    said = SpeculativeConfig(method="draft_model", draft_confidence_threshold=0.0)
    own = resolve_pair(None, said, None).speculative
    assert own is not None
    assert (own.method, own.draft_confidence_threshold) == ("draft_model", 0.0)
    assert own.model == plain.model == str(draft)


@pytest.mark.parametrize("command", [serve, demo])
def test_flags_of_serve_and_demo_make_an_application(command: ModuleType) -> None:
    """Both commands give every value that the application is made of."""
    parser = Parser("specserve", "")
    command.add_arguments(parser)
    draft = '{"model": "toy:vocab_size=16,noise=0.5"}'
    words = ["toy:vocab_size=16", "--port", "0", "--speculative-config", draft]
    serve_args, pair = serve.serve_args_from(parser.parse(words))
    assert serve_args.target.model == pair.target == "toy:vocab_size=16"
    assert serve_args.target_pool.num_replicas == serve_args.draft_pool.num_replicas == 1


def test_a_required_verification_reaches_the_orchestrator_from_flags() -> None:
    """Of `specserve serve`; without them records are not asked for."""
    parser = Parser("specserve serve", "")
    serve.add_arguments(parser)
    words = ["toy:vocab_size=32", "--port=0", "--require-verified", "--verified-dir=/x"]

    required, _ = serve.serve_args_from(parser.parse(words))
    free, _ = serve.serve_args_from(parser.parse(words[:2]))

    config = required.orchestrator_config()
    assert (config.require_verified, config.verified_dir) == (True, "/x")
    assert not free.orchestrator_config().require_verified
