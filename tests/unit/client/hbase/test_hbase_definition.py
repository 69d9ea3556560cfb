"""What a subscription is, and which peers and tables fit it."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.client.hbase import messages
from logferry.client.hbase.definition import (
    PeerDefinition,
    Unfit,
    check_name,
    check_peer,
    cluster_key,
    missing_tables,
    peer_of,
)

from tests.support.hbase_calls import ORDERS

KEY = cluster_key(["zk1:2181", "zk2:2181"], "orders_log")


def schema(table: bytes, **scopes: str) -> Any:
    found = messages.new("TableSchema")
    found.table_name.namespace, found.table_name.qualifier = b"default", table
    for family, scope in scopes.items():
        one = found.column_families.add(name=family.encode())
        one.attributes.add(first=b"VERSIONS", second=b"1")
        if scope:
            one.attributes.add(first=b"REPLICATION_SCOPE", second=scope.encode())
    return found


@pytest.mark.parametrize(
    ("hosts", "key"),
    [
        (["zk1:2181", "zk2:2181"], "zk1,zk2:2181:/logferry/hbase/n"),
        (["zk1:2181", "zk2:2182"], "zk1:2181,zk2:2182:2181:/logferry/hbase/n"),
    ],
)
def test_the_cluster_key_is_in_the_form_of_hbase(hosts: list[str], key: str) -> None:
    assert cluster_key(hosts, "n") == key


def test_a_definition_survives_its_storage() -> None:
    full = PeerDefinition("t", ("a", "n:b"), ("f",), ("q",), ("p", "ä"), "^x").check()
    assert PeerDefinition.unpacked(full.packed(), "here") == full


def test_the_same_definition_in_another_order_is_the_same() -> None:
    assert PeerDefinition("t", ("b", "default:a", "b")).check() == PeerDefinition("t", ("a", "b")).check()


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "topic": "t"}', b"\xff"])
def test_a_foreign_definition_is_refused_with_its_place(data: bytes) -> None:
    with pytest.raises(Unfit, match=r"^here "):
        PeerDefinition.unpacked(data, "here")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"topic": "a/b"}, "topic"),
        ({"tables": ()}, "tables"),
        ({"tables": ("a b",)}, "'a b' is not TABLE"),
        ({"row_pattern": "("}, "no regular expression"),
    ],
)
def test_a_wrong_definition_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ORDERS._replace(**change).check()


@pytest.mark.parametrize("name", ["", "a-b", "a/b", "ä", "x" * 65])
def test_a_name_that_is_no_peer_id_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="id of a peer"):
        check_name(name)


def test_the_peer_that_is_registered_fits() -> None:
    check_peer("orders_log", peer_of(ORDERS, KEY), ORDERS, KEY)


def test_a_peer_that_is_not_serial_is_refused_with_the_command() -> None:
    peer = peer_of(ORDERS, KEY)
    peer.serial = False
    with pytest.raises(Unfit, match=r"344 of 2900.*set_peer_serial 'orders_log', true"):
        check_peer("orders_log", peer, ORDERS, KEY)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clusterkey": "zk9:2181:/hbase"}, "not ours.*remove_peer 'orders_log'"),
        ({"clusterkey": "zk9:2181:/logferry/hbase/orders_log"}, "name the servers"),
        ({"replicate_all": True}, "ships all tables"),
    ],
)
def test_a_peer_that_ships_otherwise_is_refused(change: dict[str, Any], text: str) -> None:
    peer = peer_of(ORDERS, KEY)
    for name, value in change.items():
        setattr(peer, name, value)
    with pytest.raises(Unfit, match=text):
        check_peer("orders_log", peer, ORDERS, KEY)


def test_a_peer_of_other_tables_is_refused() -> None:
    with pytest.raises(Unfit, match="ships items, but the subscription needs orders"):
        check_peer("orders_log", peer_of(ORDERS._replace(tables=("items",)), KEY), ORDERS, KEY)


def test_tables_that_ship_fit() -> None:
    assert missing_tables(ORDERS, [schema(b"orders", d="1", e="1")]) == []
    assert missing_tables(ORDERS._replace(families=("d",)), [schema(b"orders", d="1", e="0")]) == []


def test_a_table_that_is_not_there_is_named() -> None:
    """It is refused in a new subscription only: a table that is dropped does not end the others."""
    two = ORDERS._replace(tables=("items", "orders"))
    assert missing_tables(two, [schema(b"orders", d="1")]) == ["items"]


def test_every_family_that_does_not_ship_is_named_with_its_command() -> None:
    with pytest.raises(Unfit) as caught:
        missing_tables(ORDERS, [schema(b"orders", d="1", e="0", f="")])
    text = str(caught.value)
    for family in ("e", "f"):
        assert f"alter 'orders', {{NAME => '{family}', REPLICATION_SCOPE => 1}}" in text
    assert "NAME => 'd'" not in text


def test_a_family_that_is_not_there_is_named() -> None:
    with pytest.raises(Unfit, match="orders has no family x, only d"):
        missing_tables(ORDERS._replace(families=("x",)), [schema(b"orders", d="1")])
