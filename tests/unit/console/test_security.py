"""The guard of the console: hosts, origins, tokens of forms, sessions."""

from collections.abc import Callable

import pytest

from pointsman_cli.console.web.security import (
    COOKIE,
    FAILURES_MAX,
    FAILURES_OF_ALL_MAX,
    FAILURES_WALL_SECONDS,
    SESSION_WALL_SECONDS,
    SESSIONS_MAX,
    Guard,
    Refusal,
)

TOKEN = "an-admin-token-of-a-test"
HERE = "127.0.0.1:8090"
ADDRESS = "10.0.0.9"


class Hand:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def guard(hand: Hand) -> Guard:
    return Guard(hand, hosts=frozenset({"console.example", "Second.Example"}), admin_token=TOKEN)


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:8090", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("[::1]:8090", True),
        ("10.1.2.3:8090", True),
        ("console.example:443", True),
        ("second.example:443", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8090", False),
        ("2130706433.example", False),
        ("evil@127.0.0.1", True),
        ("", False),
        ("[::1", False),
        ("a:b:c", False),
    ],
)
def test_only_addresses_and_names_that_were_given_are_ours(guard: Guard, host: str, ours: bool) -> None:
    assert (guard.misdirected("/", {"host": host}) is None) == ours
    assert guard.misdirected("/metrics", {"host": host}) is None


@pytest.mark.parametrize(
    ("site", "mode", "served"),
    [
        ("cross-site", "no-cors", False),
        ("same-site", "cors", False),
        ("cross-site", "navigate", True),
        ("same-origin", "cors", True),
        ("none", "navigate", True),
    ],
)
def test_another_site_may_link_here_and_load_nothing(guard: Guard, site: str, mode: str, served: bool) -> None:
    head = {"host": HERE, "sec-fetch-site": site, "sec-fetch-mode": mode}

    assert (guard.misdirected("/requests/r-1", head) is None) == served


def test_a_change_needs_the_token_of_its_session(guard: Guard) -> None:
    head = {"host": HERE, "origin": f"http://{HERE}"}

    assert guard.may_change("a" * 64, head, guard.csrf("a" * 64)) is None
    assert guard.may_change("a" * 64, head, guard.csrf("b" * 64)) is not None
    assert guard.may_change("a" * 64, head, "") is not None
    assert guard.may_change("", head, guard.csrf("")) is not None


@pytest.mark.parametrize(
    "head",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8091"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "authorization": f"Bearer {TOKEN}"},
    ],
)
def test_another_site_changes_nothing_even_with_the_right_token(guard: Guard, head: dict[str, str]) -> None:
    refusal = guard.may_change("a" * 64, {"host": HERE, **head}, guard.csrf("a" * 64))

    assert refusal is not None
    assert refusal.status == 403


def test_a_program_with_the_admin_token_needs_no_form_token(guard: Guard) -> None:
    head = {"host": HERE, "authorization": f"Bearer {TOKEN}"}

    assert guard.may_change("", head, "") is None
    assert guard.session("", head).acts
    assert not guard.session("", {"host": HERE, "authorization": "Bearer "}).acts
    assert not guard.session("", {"host": HERE, "authorization": f"Basic {TOKEN}"}).acts


def test_without_a_token_file_nobody_ever_acts(hand: Hand) -> None:
    guard = Guard(hand)

    assert isinstance(guard.sign_in("", ADDRESS), Refusal)
    assert not guard.session("", {"authorization": "Bearer "}).acts


def test_a_session_acts_until_it_ends(guard: Guard, hand: Hand) -> None:
    made = guard.sign_in(TOKEN, ADDRESS)
    assert isinstance(made, str)

    assert guard.session(made, {}).acts
    hand.at += SESSION_WALL_SECONDS + 1
    assert not guard.session(made, {}).acts

    again = guard.sign_in(TOKEN, ADDRESS)
    assert isinstance(again, str)
    guard.sign_out(again)
    assert not guard.session(again, {}).acts


def test_sessions_are_bounded_and_the_oldest_goes(guard: Guard) -> None:
    made = [guard.sign_in(TOKEN, ADDRESS) for _ in range(SESSIONS_MAX + 1)]

    assert not guard.session(str(made[0]), {}).acts
    assert guard.session(str(made[-1]), {}).acts


def bearer(token: str) -> dict[str, str]:
    return {"host": HERE, "authorization": f"Bearer {token}"}


def guess_in_the_form(guard: Guard, address: str) -> int:
    answer = guard.sign_in("a guess", address)
    return answer.status if isinstance(answer, Refusal) else 200


def guess_as_a_bearer(guard: Guard, address: str) -> int:
    refusal = guard.refusal("/api/fleet", bearer("a guess"), address)
    return refusal.status if refusal else 403


@pytest.mark.parametrize("guess", [guess_in_the_form, guess_as_a_bearer])
def test_who_guesses_is_refused_for_a_minute_in_the_form_and_as_a_bearer(
    guard: Guard, hand: Hand, guess: Callable[[Guard, str], int]
) -> None:
    assert [guess(guard, ADDRESS) for _ in range(FAILURES_MAX)] == [403] * FAILURES_MAX

    signed_in = guard.sign_in(TOKEN, ADDRESS)
    assert isinstance(signed_in, Refusal)
    assert signed_in.status == 429
    shown = guard.refusal("/api/fleet", bearer(TOKEN), ADDRESS)
    assert shown is not None
    assert shown.status == 429
    assert guard.refusal("/metrics", bearer(TOKEN), ADDRESS) is None
    assert guard.refusal("/", {"host": HERE}, ADDRESS) is None, "who shows no token guesses nothing"

    hand.at += FAILURES_WALL_SECONDS + 1
    assert isinstance(guard.sign_in(TOKEN, ADDRESS), str)
    assert guard.refusal("/api/fleet", bearer(TOKEN), ADDRESS) is None


def test_who_guesses_locks_nobody_else_out(guard: Guard) -> None:
    for _ in range(FAILURES_OF_ALL_MAX):
        guess_in_the_form(guard, ADDRESS)
        guess_as_a_bearer(guard, ADDRESS)
        guess_as_a_bearer(guard, "2001:db8::1")
        guess_in_the_form(guard, "2001:db8::2")

    assert isinstance(guard.sign_in(TOKEN, "10.0.0.10"), str)
    assert guard.refusal("/api/fleet", bearer(TOKEN), "10.0.0.10") is None
    assert isinstance(guard.sign_in(TOKEN, "2001:db8:0:1::1"), str)
    assert isinstance(guard.sign_in(TOKEN, "2001:db8::3"), Refusal), "of the same network"


def test_guesses_of_many_addresses_are_bounded_together(guard: Guard, hand: Hand) -> None:
    answers = [guess_as_a_bearer(guard, f"10.0.{number // 256}.{number % 256}") for number in range(2_000)]

    assert answers == [403] * FAILURES_OF_ALL_MAX + [429] * (2_000 - FAILURES_OF_ALL_MAX)
    hand.at += FAILURES_WALL_SECONDS + 1
    assert isinstance(guard.sign_in(TOKEN, ADDRESS), str)


def test_a_console_without_tokens_refuses_no_bearer(hand: Hand) -> None:
    guard = Guard(hand)

    assert {guess_as_a_bearer(guard, ADDRESS) for _ in range(2 * FAILURES_MAX)} == {403}


def test_with_a_readers_token_reading_needs_one_of_the_tokens(hand: Hand) -> None:
    guard = Guard(hand, admin_token=TOKEN, reader_token="a-reader-token-of-a-test")
    reader = guard.sign_in("a-reader-token-of-a-test", ADDRESS)
    assert isinstance(reader, str)

    assert not guard.may_read("", {})
    assert not guard.may_read("c" * 64, {})
    assert guard.may_read(reader, {})
    assert not guard.session(reader, {}).acts
    assert guard.session(reader, {}).reads
    assert not guard.session("c" * 64, {}).reads
    assert guard.may_read("", {"authorization": f"Bearer {TOKEN}"})


@pytest.mark.parametrize("cookie", ["", "x=y", f"{COOKIE}=short", f"{COOKIE}=\x00; a", "=;=;", f"{COOKIE}"])
def test_a_cookie_that_is_none_of_ours_is_no_session(guard: Guard, cookie: str) -> None:
    assert guard.session_id({"cookie": cookie}) == ""
