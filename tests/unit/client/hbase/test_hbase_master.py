"""Answers of HBase's master that are no success: it starts, it has lost a procedure, it refuses. And of hbase:meta."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from logferry.client.hbase import frames, messages
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import HBaseMaster, HBaseMeta, ParentRegion, parents_of
from logferry.client.hbase.messages import ForeignBytes, delimited
from logferry.client.hbase.zookeeper import Address, Unanswered


@contextmanager
def master(answers: Sequence[bytes]) -> Iterator[HBaseMaster]:
    """Gives one answer a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                link, _ = listener.accept()
                with link:
                    link.recv(65536)
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield HBaseMaster(lambda: Address("127.0.0.1", listener.getsockname()[1]))
        thread.join(20)


def exception(kind: str, text: str) -> bytes:
    problem = messages.new("ExceptionResponse", exception_class_name=kind, stack_trace=f"{kind}: {text}\n  at HBase")
    body = delimited(messages.new("ResponseHeader", call_id=1, exception=problem))
    return frames.LENGTH.pack(len(body)) + body


def answer(name: str, **fields: Any) -> bytes:
    return frames.answer(1, messages.new(name, **fields))


@pytest.mark.parametrize("kind", ["PleaseHoldException", "ipc.ServerNotRunningYetException"])
def test_a_master_that_starts_does_not_answer_yet(kind: str) -> None:
    """So that a service that is started together with HBase is started again, and not taken for refused."""
    with master([exception(f"org.apache.hadoop.hbase.{kind}", "Master is initializing")]) as asked:
        with pytest.raises(Unanswered, match="starts: Master is initializing"):
            asked.peers()


def test_another_exception_is_a_refusal() -> None:
    with master([exception("org.apache.hadoop.hbase.DoNotRetryIOException", "no such thing")]) as asked:
        with pytest.raises(CallFailed, match="no such thing"):
            asked.peers()


def test_a_procedure_that_the_master_has_lost_is_not_done() -> None:
    """`logferry hbase pause` would say that HBase keeps its changes, while it ships them."""
    with master([answer("ProcedureStarted", proc_id=7), answer("ProcedureResult", state=0)]) as asked:
        with pytest.raises(Unanswered, match="does not know the DisableReplicationPeer"):
            asked.disable_peer("orders_log")


def test_a_procedure_is_waited_for() -> None:
    states = [answer("ProcedureResult", state=state) for state in (1, 1, 2)]
    with master([answer("ProcedureStarted", proc_id=7), *states]) as asked:
        asked.disable_peer("orders_log")


# ---- hbase:meta -----------------------------------------------------------------------------------------------------

# The answer of HBase 2.6.4 to a scan of a table g, whose only region was split at the row FF 61, and merged again.
META = base64.b64decode("""
AggB4gkQjICAgJCRgsIJGAEg4NQDKtQBCmYKMmcsLDE3OTU3ODE5NDkyNjEuYjYxYmI5ZDVhZmViN2Q5MWUxZTZlMTg2MmJkZTJjNWMuEgtyZXBfYmFycm
llchoQc2VxbnVtRHVyaW5nT3BlbiC+9sfnoTQoBDIIAAAAAAAAAAUKZgoyZywsMTc5NTc4MTk0OTI2MS5iNjFiYjlkNWFmZWI3ZDkxZTFlNmUxODYyYmRl
MmM1Yy4SC3JlcF9iYXJyaWVyGhBzZXFudW1EdXJpbmdPcGVuIJTyx+ehNCgEMggAAAAAAAAAAiAAKAAq3QIKhgEKMmcsLDE3OTU3ODE5NTAwMjkuOThhZj
c0MzUwZWUxMTZjYTQxZjNhYTE4ODk3ZTgyYWIuEgtyZXBfYmFycmllchoGcGFyZW50IL72x+ehNCgEMjJnLCwxNzk1NzgxOTQ5MjYxLmI2MWJiOWQ1YWZl
YjdkOTFlMWU2ZTE4NjJiZGUyYzVjLgpmCjJnLCwxNzk1NzgxOTUwMDI5Ljk4YWY3NDM1MGVlMTE2Y2E0MWYzYWExODg5N2U4MmFiLhILcmVwX2JhcnJpZX
IaEHNlcW51bUR1cmluZ09wZW4gt//H56E0KAQyCAAAAAAAAAAICmYKMmcsLDE3OTU3ODE5NTAwMjkuOThhZjc0MzUwZWUxMTZjYTQxZjNhYTE4ODk3ZTgy
YWIuEgtyZXBfYmFycmllchoQc2VxbnVtRHVyaW5nT3BlbiCB+sfnoTQoBDIIAAAAAAAAAAUgACgAKqwCCr0BCjJnLCwxNzk1NzgxOTUwMDMwLmUxMWM1YT
JiNDFmOGExM2YxZWJlMDA1MjQxNmJlNDk2LhILcmVwX2JhcnJpZXIaBnBhcmVudCC3/8fnoTQoBDJpZywsMTc5NTc4MTk1MDAyOS45OGFmNzQzNTBlZTEx
NmNhNDFmM2FhMTg4OTdlODJhYi7/AGcs//9hLDE3OTU3ODE5NTAwMjkuNzc5OTAzODlmYzYzNjYzODI3MjA5MDM1OTMyNzIwNGYuCmYKMmcsLDE3OTU3OD
E5NTAwMzAuZTExYzVhMmI0MWY4YTEzZjFlYmUwMDUyNDE2YmU0OTYuEgtyZXBfYmFycmllchoQc2VxbnVtRHVyaW5nT3BlbiCLgsjnoTQoBDIIAAAAAAAA
AAggACgAKuMCCogBCjRnLP9hLDE3OTU3ODE5NTAwMjkuNzc5OTAzODlmYzYzNjYzODI3MjA5MDM1OTMyNzIwNGYuEgtyZXBfYmFycmllchoGcGFyZW50IL
72x+ehNCgEMjJnLCwxNzk1NzgxOTQ5MjYxLmI2MWJiOWQ1YWZlYjdkOTFlMWU2ZTE4NjJiZGUyYzVjLgpoCjRnLP9hLDE3OTU3ODE5NTAwMjkuNzc5OTAz
ODlmYzYzNjYzODI3MjA5MDM1OTMyNzIwNGYuEgtyZXBfYmFycmllchoQc2VxbnVtRHVyaW5nT3BlbiC3/8fnoTQoBDIIAAAAAAAAAAgKaAo0Zyz/YSwxNz
k1NzgxOTUwMDI5Ljc3OTkwMzg5ZmM2MzY2MzgyNzIwOTAzNTkzMjcyMDRmLhILcmVwX2JhcnJpZXIaEHNlcW51bUR1cmluZ09wZW4g9vnH56E0KAQyCAAA
AAAAAAAFIAAoADAAQABYGw==
""")
FIRST, UPPER = "b61bb9d5afeb7d91e1e6e1862bde2c5c", "77990389fc636638272090359327204f"
LOWER, MERGED = "98af74350ee116ca41f3aa18897e82ab", "e11c5a2b41f8a13f1ebe0052416be496"


@contextmanager
def meta(*answers: bytes) -> Iterator[HBaseMeta]:
    """Gives them on one connection, one a call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                for answer in answers:
                    link.recv(65536)
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield HBaseMeta(lambda: Address("127.0.0.1", listener.getsockname()[1]))
        thread.join(20)


def test_the_parents_of_regions_are_read_as_hbase_writes_them() -> None:
    """The upper half has FF in its name, which is doubled where it stands among the parents."""
    with meta(frames.LENGTH.pack(len(META)) + META) as asked:
        found = asked.parents("g")
    halves = (ParentRegion(LOWER, opened=5, end=8), ParentRegion(UPPER, opened=5, end=8))
    one = (ParentRegion(FIRST, opened=2, end=5),)
    assert found == {FIRST: (), LOWER: one, UPPER: one, MERGED: halves}


def test_a_scan_goes_on_until_it_ends() -> None:
    """A piece may be empty: the server says that it still lives."""
    cells = list(frames.reply_of(memoryview(META), "ScanResponse").results)
    pieces = [
        answer("ScanResponse", scanner_id=9, more_results=True, results=some) for some in (cells[:2], [], cells[2:])
    ]
    with meta(*pieces, answer("ScanResponse", more_results=False)) as asked:
        assert asked.parents("g")[MERGED][1].region == UPPER


@pytest.mark.parametrize("kind", ["NotServingRegionException", "UnknownScannerException"])
def test_a_meta_that_is_elsewhere_is_asked_again_later(kind: str) -> None:
    with meta(exception(f"org.apache.hadoop.hbase.{kind}", "not here")) as asked:
        with pytest.raises(Unanswered, match="refuses a scan of it: not here"):
            asked.parents("g")


def test_a_meta_that_cannot_be_read_is_a_refusal() -> None:
    with meta(exception("org.apache.hadoop.hbase.regionserver.NoSuchColumnFamilyException", "rep_barrier")) as asked:
        with pytest.raises(CallFailed, match="rep_barrier"):
            asked.parents("g")


@pytest.mark.parametrize(
    ("row", "qualifier", "value"),
    [
        (b"g,,1.abc.", b"parent", b""),
        (b"g,,1." + b"a" * 32 + b".", b"parent", b"g,,1.xyz."),
        (b"g,,1." + b"a" * 32 + b".", b"seqnumDuringOpen", b"123"),
    ],
)
def test_cells_of_another_kind_are_refused(row: bytes, qualifier: bytes, value: bytes) -> None:
    cell = messages.new("Cell", row=row, family=b"rep_barrier", qualifier=qualifier, value=value)
    with pytest.raises(ForeignBytes):
        parents_of([cell])
    with meta(answer("ScanResponse", more_results=False, results=[{"cell": [cell]}])) as asked:
        with pytest.raises(Unanswered, match="cannot be read"):
            asked.parents("g")
