"""A credentials file is used as a whole or told as unusable."""

from collections import UserString
from pathlib import Path

import nkeys
import pytest

from pointsman.adapters.jetstream.identity import Identity, IdentityError

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
JWT = "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n"
SEED_MARK = "\n-----BEGIN USER NKEY SEED-----\n"
CREDS = f"{JWT}{SEED_MARK}{SEED}\n------END USER NKEY SEED------\n"


def credentials(directory: Path, content: str) -> Identity:
    file = directory / "user.creds"
    file.write_text(content)
    return Identity(credentials=str(file))


def test_a_whole_creds_file_is_handed_over_by_content_so_that_a_later_half_of_it_is_not_read(tmp_path: Path) -> None:
    assert credentials(tmp_path, CREDS).connect_options() == {"user_credentials": UserString(CREDS)}
    assert credentials(tmp_path, CREDS.replace("\n", "\r\n")).connect_options() == {
        "user_credentials": UserString(CREDS)
    }
    assert credentials(tmp_path, f"{SEED}\n").connect_options() == {"nkeys_seed_str": SEED}


def test_a_file_cut_anywhere_is_unusable_until_its_seed_is_whole(tmp_path: Path) -> None:
    whole = CREDS.index(SEED) + len(SEED) + 1
    for length in range(whole):
        with pytest.raises(IdentityError, match=r"user\.creds cannot be used: "):
            credentials(tmp_path, CREDS[:length]).connect_options()
    assert "user_credentials" in credentials(tmp_path, CREDS[:whole]).connect_options()


@pytest.mark.parametrize("seed", ["", "SUA", "S" * 58, SEED[:-1], f"{SEED}AAAAAAAA", SEED.replace("A", "1", 1)])
def test_a_file_with_another_thing_for_a_seed_is_unusable(seed: str, tmp_path: Path) -> None:
    for content in (CREDS.replace(SEED, seed), f"{seed}\n"):
        with pytest.raises(IdentityError, match="cannot be used"):
            credentials(tmp_path, content).connect_options()


def test_a_key_without_its_certificate_is_no_connection_in_the_clear() -> None:
    with pytest.raises(IdentityError, match="without its certificate"):
        Identity(key="client.key").connect_options()
