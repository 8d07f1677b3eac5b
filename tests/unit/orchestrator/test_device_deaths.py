"""How a request that devices die of is told from those in its company."""

from __future__ import annotations

from specserve.orchestrator.device_deaths import DeviceDeaths


def test_two_deaths_in_one_place_the_last_one_alone_prove_it() -> None:
    """The first one may be anybody's; what dies of a request in company proves nothing."""
    deaths = DeviceDeaths()
    assert not deaths.runs_alone
    deaths.note_death(3)
    assert deaths.runs_alone
    deaths.note_death(2)
    assert not deaths.is_proven
    deaths.note_death(1)
    assert deaths.is_proven


def test_one_death_alone_proves_nothing_and_the_second_does() -> None:
    """A device may die of itself while a single request is there."""
    deaths = DeviceDeaths()
    deaths.note_death(1)
    assert not deaths.is_proven
    deaths.note_death(1)
    assert deaths.is_proven


def test_who_gets_past_the_place_is_in_company_again() -> None:
    """An innocent one, and one death later in its life is another first one."""
    deaths = DeviceDeaths()
    deaths.note_death(4)
    deaths.note_progress()
    assert not deaths.runs_alone
    deaths.note_death(1)
    assert not deaths.is_proven


def test_a_request_that_kills_at_many_places_is_found_out_too() -> None:
    """After the second death it stays alone, so that the third one tells."""
    deaths = DeviceDeaths()
    for _ in range(2):
        deaths.note_death(4)
        deaths.note_progress()
    assert deaths.runs_alone
    deaths.note_death(1)
    assert deaths.is_proven


def test_deaths_that_another_orchestrator_saw_count() -> None:
    """It begins alone, and the next death tells; each is told on."""
    told: list[int] = []
    deaths = DeviceDeaths(1)
    deaths.on_death = lambda: told.append(deaths.count)
    assert deaths.runs_alone
    deaths.note_death(1)
    assert deaths.is_proven
    assert told == [2]
