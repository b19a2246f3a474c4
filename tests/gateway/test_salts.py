"""Salts: who may share prefix blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.fake import FakeBackend
from surefoot.gateway.salts import Salts
from surefoot.gateway.tenants import Tenant

from .harness import bearer, client_of, hashes

TENANT_IDS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)
KEYS = st.none() | st.text(max_size=20)


@given(TENANT_IDS, TENANT_IDS, KEYS, KEYS)
def test_a_salt_belongs_to_one_tenant_and_key(one: str, two: str, key_one: Any, key_two: Any) -> None:
    """Two requests have one salt if and only if tenant and key are the same."""
    salts = Salts()
    same = salts.salt(one, key_one) == salts.salt(two, key_two)
    assert same == ((one, key_one) == (two, key_two))


def test_no_key_aims_at_another_tenant() -> None:
    """A key that spells another tenant's id, or its id and key, gives another salt."""
    salts = Salts()
    theirs = {salts.salt("b", None), salts.salt("b", "k"), salts.salt("b", "")}
    for key in ("b", "\nb", "b\nk", "k", "", "\x00b", next(iter(theirs))):
        assert salts.salt("a", key) not in theirs


def test_salts_differ_between_processes() -> None:
    """What one process used says nothing about another's."""
    assert Salts().salt("a", None) != Salts().salt("a", None)


def test_salts_reach_the_backend() -> None:
    """Two tenants with the same prompt and key have two salts; one tenant's requests share one per key."""
    backend = FakeBackend()
    body = {"model": "fake", "prompt": "Hi"}
    tenants = [Tenant(id=name, key_hashes=hashes(name)) for name in ("a", "b")]
    with client_of(*tenants, backend=backend) as client:
        for key in ("a", "b"):
            for fields in ({}, {}, {"prompt_cache_key": "x"}, {"prompt_cache_key": "x"}, {"user": "x"}):
                assert client.post("/v1/completions", json=body | fields, headers=bearer(key)).is_success
    salts = [request.salt for request in backend.requests]
    ours, theirs = salts[:5], salts[5:]
    assert set(ours).isdisjoint(theirs)
    for own in (ours, theirs):
        assert own[0] == own[1] == own[4]
        assert own[2] == own[3] != own[0]
