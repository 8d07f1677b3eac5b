"""When a replica is ill, and when it only had a request that devices die of."""

from __future__ import annotations

import pytest

from specserve.rpc.device_deaths import MAX_BLAMED, MAX_RESTARTS, DeviceDeath, is_ill


def death(*computed: str, has_answered: bool = True) -> DeviceDeath:
    """Make one."""
    return DeviceDeath(0.0, frozenset(computed), has_answered)


@pytest.mark.parametrize("computed", [(), ("a", "b")])
def test_deaths_that_no_request_is_blamed_for_are_the_devices_own(
    computed: tuple[str, ...],
) -> None:
    """Idle, or in company of which nobody was ever alone."""
    assert not is_ill([death(*computed)] * MAX_RESTARTS)
    assert is_ill([death(*computed)] * (MAX_RESTARTS + 1))


def test_a_request_is_blamed_for_the_deaths_before_in_which_it_had_company() -> None:
    """As many as there may be, for the device had worked: none of them is its own."""
    deaths = [death("poison", "b", "c"), death("poison")] * (MAX_BLAMED // 2)
    assert not is_ill(deaths)
    assert is_ill([*deaths, death("poison")])


def test_requests_that_only_wait_for_company_are_not_blamed() -> None:
    """Another request's guilt does not excuse a device."""
    assert is_ill([death("poison"), *[death("b", "c")] * (MAX_RESTARTS + 1)])


def test_a_device_on_which_nothing_works_is_found_out_by_different_requests() -> None:
    """One request that does not work at all is one death, however often; four are a device."""
    idle = [death(name, has_answered=False) for name in ("a", "a", "b", "a", "c")]
    assert not is_ill(idle)
    assert is_ill([*idle, death("d", has_answered=False)])
