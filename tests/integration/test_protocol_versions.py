"""A rolling update meets the version before its own; what is further away is refused by name."""

from __future__ import annotations

import pytest

from helpers.pair import TARGET, greedy_tokens, make_request, running_pair
from helpers.waiting import eventually
from specserve.orchestrator import pool as pool_module
from specserve.rpc import codec
from specserve.rpc.protocol import is_spoken


@pytest.mark.parametrize(
    ("theirs", "ours", "wanted"),
    [
        (1, 1, True),
        (1, 2, True),
        (2, 1, True),
        (3, 1, False),
        (1, 3, False),
        (0, 1, False),  # a peer that says none, such as another service at the address
    ],
)
def test_neighbours_are_spoken_with(theirs: int, ours: int, *, wanted: bool) -> None:
    """N talks to N - 1, whichever of both asks."""
    assert is_spoken(theirs, ours) is wanted


def speaking(monkeypatch: pytest.MonkeyPatch, *, replicas: int, orchestrator: int) -> None:
    """Have replicas and orchestrator say and take other versions than this build's."""
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", replicas)
    monkeypatch.setattr(pool_module, "is_spoken", lambda theirs: is_spoken(theirs, orchestrator))


@pytest.mark.parametrize(("replicas", "orchestrator"), [(1, 2), (2, 1)])
async def test_services_one_version_apart_serve(
    replicas: int, orchestrator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever was updated first, the pair is ready and the text is right, drafts used."""
    speaking(monkeypatch, replicas=replicas, orchestrator=orchestrator)
    async with running_pair() as pair:
        links = pair.orchestrator.pair.targets.links.values()
        assert [link.model.protocol_version for link in links if link.model] == [replicas]
        answer = await pair.generate(make_request(max_tokens=24))
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 24)
    assert answer.record is not None
    assert answer.record.num_draft_tokens > 0


async def test_services_two_versions_apart_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither replica is used, and whoever asks is told which versions they are."""
    speaking(monkeypatch, replicas=3, orchestrator=1)
    async with running_pair(wait=False) as pair:
        served = pair.orchestrator.pair
        await eventually(lambda: served.targets.refusals, "the target is refused")
        assert "speaks protocol 3" in served.describe(include_token_table=False).reason
        assert served.targets.usable() == []
