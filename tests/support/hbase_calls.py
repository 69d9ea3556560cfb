"""Calls as a region server ships them, for tests."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from uuid import UUID

from logferry.client.hbase import frames, messages
from logferry.client.hbase.cells import CODECS, HBaseCell, packed
from logferry.client.hbase.definition import PeerDefinition

CLUSTER = "0a1b2c3d-0000-4000-8000-123456789abc"
REGION = "0123456789abcdef0123456789abcdef"
OTHER_CLUSTER = "ffffffff-0000-4000-8000-123456789abc"
OTHER_REGION = "f" * 32
ORDERS = PeerDefinition("orders", ("orders",))
Edit = tuple[str, int, Sequence[HBaseCell]]  # region, sequence id, cells


def put(row: str, value: bytes = b"v", family: str = "d", qualifier: str = "q", timestamp: int = 7) -> HBaseCell:
    return HBaseCell(row.encode(), family.encode(), qualifier.encode(), timestamp, "put", value)


def shipped(edits: Iterable[Edit], cluster: str = CLUSTER, table: str = "orders") -> tuple[Any, bytes]:
    """The request and its cell block."""
    request, block = messages.new("ReplicateWALEntryRequest"), b""
    for region, seqno, cells in edits:
        entry = request.entry.add(associated_cell_count=len(cells))
        entry.key.encoded_region_name, entry.key.table_name = region.encode(), table.encode()
        entry.key.log_sequence_number, entry.key.write_time = seqno, 1_700_000_000_000
        number = UUID(cluster).int
        entry.key.cluster_ids.add(most_sig_bits=number >> 64, least_sig_bits=number & (1 << 64) - 1)
        block += b"".join(map(packed, cells))
    return request, block


class RegionServer:
    """A connection as a region server opens it."""

    def __init__(self, port: int, opening: bytes | None = None) -> None:
        self.link = socket.create_connection(("127.0.0.1", port), 20)
        self.link.sendall(frames.opening("AdminService", "hbase", CODECS[0]) if opening is None else opening)
        self._calls = 0

    def __enter__(self) -> RegionServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def ship(self, edits: Iterable[Edit], method: str = "ReplicateWALEntry", **options: Any) -> str:
        """The text of the refusal; empty: the call is done."""
        self._calls += 1
        request, block = shipped(edits, **options)
        self.link.sendall(frames.request(self._calls, method, request, block))
        return self.answer()

    def answer(self) -> str:
        with self.link.makefile("rb") as stream:
            size = frames.LENGTH.unpack(stream.read(4))[0]
            frame = stream.read(size)
        try:
            frames.reply_of(memoryview(frame), "ProcedureStarted")
        except frames.CallFailed as refusal:
            return str(refusal)
        return ""

    @property
    def is_cut(self) -> bool:
        """Whether the other side closes the connection; waits for it."""
        try:
            return self.link.recv(1) == b""
        except ConnectionError:
            return True


# ---- calls that overlap ---------------------------------------------------------------------------------------------


def edits_with_parts(seed: int, count: int = 120) -> list[Edit]:
    """Of one region. Every fourth edit has 20 to 40 cells of more than 1 kB."""
    chance = random.Random(seed)
    sizes = [chance.randint(20, 40) if number % 4 == 0 else chance.randint(1, 3) for number in range(count)]
    return [
        (REGION, 3 * number + 2, [put(f"{number}-{n}", b"v" * 1000) for n in range(size)])
        for number, size in enumerate(sizes)
    ]


def ship_overlapping(ports: Sequence[int], edits: Sequence[Edit], seed: int) -> int:
    """As HBase ships again what took too long, also to another connector: each piece goes out three times, and the
    next one as soon as one of them is done. How many calls were still carried out then.
    """
    chance, late, at = random.Random(seed), list[Future[str]](), 0
    with ThreadPoolExecutor(64) as pool:
        while at < len(edits):
            piece = edits[at : at + chance.randint(1, 12)]
            done, others = wait(
                [pool.submit(_shipped, port, piece) for port in chance.choices(ports, k=3)], 60, FIRST_COMPLETED
            )
            assert [call.result() for call in done] == [""] * len(done)
            late += others
            at += len(piece)
        assert {call.result(60) for call in late} <= {""}
    return len(late)


def rows_of(edits: Iterable[Edit]) -> list[tuple[int, str]]:
    """Each cell of them in order, as sequence id and row."""
    return [(seqno, cell.row.decode()) for _, seqno, cells in edits for cell in cells]


def _shipped(port: int, edits: Sequence[Edit]) -> str:
    with RegionServer(port) as source:
        return source.ship(edits)
