"""Answers of HBase's master that are no success: it starts, it has lost a procedure, it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from logferry.client.hbase import frames, messages
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import HBaseMaster
from logferry.client.hbase.messages import delimited
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
