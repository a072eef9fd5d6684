"""Whose requests may share cached blocks."""

import re

from pointsman.contracts.cache_salts import CacheSalts
from pointsman.primitives import Tenant

ALICE, BOB, CAROL = Tenant("alice"), Tenant("bob"), Tenant("carol")
VLLM_TAKES = re.compile(r"[^@/\\\x00]{1,128}")


def no_shared_groups(_tenant: Tenant) -> str:
    return ""


def salt(salts: CacheSalts, tenant: Tenant, own: str = "") -> str:
    return salts.salt(salts.group(tenant), own)


def test_tenants_have_salts_of_their_own_that_stay_the_same() -> None:
    salts, again = CacheSalts(b"secret", no_shared_groups), CacheSalts(b"secret", no_shared_groups)

    assert salt(salts, ALICE) == salt(again, ALICE) != salt(salts, BOB)
    assert salt(salts, ALICE) != salt(CacheSalts(b"another", no_shared_groups), ALICE)


def test_tenants_of_a_declared_group_share_and_nobody_gets_in_by_its_name() -> None:
    groups = {"alice": "public", "bob": "public", "public": ""}
    salts = CacheSalts(b"secret", lambda tenant: groups.get(tenant, ""))

    assert salt(salts, ALICE) == salt(salts, BOB)
    assert salt(salts, Tenant("public")) != salt(salts, ALICE)
    assert salt(salts, Tenant("group:public")) != salt(salts, ALICE)


def test_a_clients_salt_refines_that_of_its_group_and_never_replaces_it() -> None:
    salts = CacheSalts(b"secret", no_shared_groups)

    assert salt(salts, ALICE, "mine") == salt(salts, ALICE, "mine") != salt(salts, ALICE)
    assert salt(salts, ALICE, "mine") != salt(salts, BOB, "mine")
    assert salt(salts, BOB, salt(salts, ALICE)) != salt(salts, ALICE)


def test_a_tenant_and_a_salt_cannot_be_cut_elsewhere() -> None:
    salts = CacheSalts(b"secret", no_shared_groups)

    assert salt(salts, Tenant("a"), "b") != salt(salts, Tenant("ab"), "")
    assert salt(salts, Tenant("a1"), "2") != salt(salts, Tenant("a"), "12")


def test_every_salt_is_one_that_vllm_takes() -> None:
    salts = CacheSalts(b"secret", no_shared_groups)

    for own in ("", "x" * 1024, "a/b@c\\d\x00", "\u00e9\ud800"):
        assert VLLM_TAKES.fullmatch(salt(salts, CAROL, own))
