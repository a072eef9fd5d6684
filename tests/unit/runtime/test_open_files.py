import resource

import pytest

from pointsman.runtime.open_files import clients_max, raised_open_files


@pytest.mark.parametrize("soft", [256, 20_000])
def test_a_shell_of_macos_does_not_leave_an_ingress_with_one_client(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    """There the hard limit is infinite, which the soft one may not be, nor more than the kernel's own bound for a process."""
    limits = (soft, resource.RLIM_INFINITY)

    def set_limits(_what: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if wanted[0] == resource.RLIM_INFINITY or wanted[0] > 61_440:
            raise ValueError("current limit exceeds maximum limit")
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)

    assert raised_open_files() >= max(soft, 10_000)
    assert limits[1] == resource.RLIM_INFINITY
    assert clients_max(limits[0]) > 4_000


def test_where_the_hard_limit_is_a_number_all_of_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: taken[-1] if taken else (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, wanted: taken.append(wanted))

    assert raised_open_files() == 4096
