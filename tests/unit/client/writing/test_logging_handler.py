"""Logging through the handler: what is recorded, that it never waits for a gateway that is away, forks, and the end."""

from __future__ import annotations

import logging
import logging.config
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from logferry.client import LogferryHandler
from logferry.client.transport.connections import NoResponse
from logferry.client.writing.logging_handler import LogQueue, QueuedLines

from tests.support.fake_gateway import FakeGateway, Served

AWAY = "http://127.0.0.1:9"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("program")
    yield logger
    for handler in logger.handlers:
        handler.close()


def lines(gateway: FakeGateway) -> list[str]:
    return [line for stored in gateway.sources.values() for line in stored.content().decode().splitlines()]


class Gate:
    """A gateway that answers when it is let; what waits there is seen."""

    def __init__(self, gateway: FakeGateway) -> None:
        self.gateway, self.open, self.asked = gateway, threading.Event(), threading.Event()

    def __call__(self, url: str, headers: dict[str, str], body: bytes) -> object:
        self.asked.set()
        if not self.open.wait(30):
            raise NoResponse("nobody opened")
        return self.gateway(url, headers, body)


def test_records_become_lines_of_one_source(gateway: FakeGateway, served: Served, log: logging.Logger) -> None:
    handler = LogferryHandler(served.url, "t", attributes={"env": "test"})
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)
    for number in range(2000):
        log.info("record %d", number)
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("broken \udcff")
    handler.flush()
    found = lines(gateway)
    assert found[:2000] == [f"INFO record {number}" for number in range(2000)]
    assert found[2000] == "ERROR broken \\udcff"
    assert found[-1] == "KeyError: 'k'"
    assert list(gateway.sources) == [handler.source_id]
    assert str(os.getpid()) in handler.source_id
    assert len(gateway.requests) < 500
    assert gateway.sources[handler.source_id].chunks[0].attributes == {"env": "test"}


def test_it_never_waits_and_reports_missing_records(gateway: FakeGateway, log: logging.Logger) -> None:
    """The gateway takes nothing until all was logged; that the program got there is the proof."""
    gate = Gate(gateway)
    with Served(gate) as served:  # type: ignore[arg-type]
        handler = LogferryHandler(served.url, "t", queue_records=10)
        log.addHandler(handler)
        log.info("first")
        assert gate.asked.wait(30)
        for number in range(100):
            log.info("record %d", number)
        assert gateway.sources == {}
        gate.open.set()
        handler.flush()
        log.info("last")
        handler.flush()
    found = lines(gateway)
    kept = [line for line in found if line.startswith("record")]
    missing = [line for line in found if "missing" in line]
    assert found[0] == "first"
    assert kept == [f"record {number}" for number in range(len(kept))]
    assert 9 <= len(kept) < 100
    assert missing == [f"{100 - len(kept)} log records are missing here, which could not be delivered"]
    assert found.index(missing[0]) == 1 + len(kept)
    assert found[-1] == "last"


def test_a_gateway_that_is_away_holds_up_neither_the_program_nor_its_end(log: logging.Logger) -> None:
    handler = LogferryHandler(AWAY, "t", close_timeout_s=0.2, queue_records=100)
    log.addHandler(handler)
    for number in range(1000):
        log.info("record %d", number)
    handler.flush()
    handler.close()
    log.info("after the end")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("logferry-writer")]


def test_a_rejected_record_is_reported_and_the_next_are_taken(
    gateway: FakeGateway, served: Served, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.largest_chunk_bytes = 1000
    handler = LogferryHandler(served.url, "t")
    log.addHandler(handler)
    log.info("good")
    handler.flush()
    log.info("x" * 2000)
    handler.flush()
    log.info("good again")
    handler.flush()
    assert lines(gateway) == ["good", "1 log record is missing here, which could not be delivered", "good again"]
    assert "too-large" in capsys.readouterr().err


def test_two_of_one_name_do_not_fight(
    gateway: FakeGateway, served: Served, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (LogferryHandler(served.url, "t", "app") for _ in range(2))
    for handler in (first, second, first, second):
        log.handlers = [handler]
        log.info("one")
        handler.flush()
    log.handlers = [first, second]
    first.flush()  # the first time, what is settled is that the record is lost
    assert gateway.sources["app"].content() == b"one\none\none\n"
    assert first.source_id.startswith("app~")
    assert second.source_id == "app"
    assert lines(gateway).count("one") + sum("missing" in line for line in lines(gateway)) == 4
    assert "superseded" in capsys.readouterr().err


def test_a_forked_process_is_a_source_of_its_own(gateway: FakeGateway, log: logging.Logger) -> None:
    gate = Gate(gateway)
    with Served(gate) as served:  # type: ignore[arg-type]
        handler = LogferryHandler(served.url, "t", "app")
        log.addHandler(handler)
        log.info("parent")
        assert gate.asked.wait(30)
        child = os.fork()
        if child == 0:
            log.info("child")
            handler.close()
            os._exit(0)
        gate.open.set()
        os.waitpid(child, 0)
        log.info("parent again")
        handler.flush()
    assert {name: stored.content() for name, stored in gateway.sources.items()} == {
        "app": b"parent\nparent again\n",
        f"app:{child}": b"child\n",
    }


def test_what_is_logged_by_the_formatter_does_not_go_round(
    gateway: FakeGateway, served: Served, log: logging.Logger
) -> None:
    class Talking(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            log.info("formatting")
            return super().format(record)

    handler = LogferryHandler(served.url, "t")
    handler.setFormatter(Talking())
    log.addHandler(handler)
    log.info("one")
    handler.flush()
    assert lines(gateway) == ["one"]


def test_a_formatter_that_fails_does_not_break_the_program(
    served: Served, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.addHandler(LogferryHandler(served.url, "t"))
    log.info("%d", "not a number")
    assert "TypeError" in capsys.readouterr().err


def test_it_is_named_in_a_configuration(gateway: FakeGateway, served: Served) -> None:
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"ferry": {"class": "logferry.client.LogferryHandler", "urls": served.url, "topic": "t"}},
        "loggers": {"configured": {"handlers": ["ferry"], "level": "INFO"}},
    })  # fmt: skip
    logger = logging.getLogger("configured")
    logger.info("one")
    (handler,) = logger.handlers
    logger.handlers = []
    handler.close()
    assert "one" in lines(gateway)


PROGRAM = """
import logging, sys
from logferry.client import LogferryHandler
logging.basicConfig(level="INFO", handlers=[LogferryHandler(sys.argv[1], "t", close_timeout_s=float(sys.argv[2]))])
for number in range(100):
    logging.info("record %d", number)
"""


def test_the_end_of_the_process_waits_for_what_was_logged(gateway: FakeGateway, served: Served) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, served.url, "30"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert lines(gateway) == [f"INFO:root:record {number}" for number in range(100)]


def test_the_end_of_the_process_does_not_wait_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, AWAY, "0.2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


# ---- the queue --------------------------------------------------------------------------------------------------


def test_the_queue_counts_what_found_no_place_where_it_is_missing() -> None:
    waiting = LogQueue(2, 1000)
    assert [waiting.put(b"%d" % n, n) for n in range(4)] == [True, True, False, False]
    assert waiting.take(1, 0) == QueuedLines(b"0", 1, 0)
    assert not waiting.put(b"4", 4), "the gap holds its place"
    assert waiting.take(100, 0) == QueuedLines(b"1", 1, 1)
    assert waiting.put(b"5", 5)
    assert waiting.take(100, 0) == QueuedLines(b"", 1, 0, 3)
    assert waiting.take(100, 0) == QueuedLines(b"5", 1, 5)
    assert waiting.take(100, 0) is None


def test_a_signal_s_handler_may_log_in_the_midst_of_it() -> None:
    waiting = LogQueue(2, 1000)
    with waiting._lock:
        assert waiting.put(b"a", 1)
    assert waiting.take(100, 0) == QueuedLines(b"a", 1, 1)


def test_the_queue_is_bounded_in_bytes() -> None:
    waiting = LogQueue(1000, 10)
    assert [waiting.put(b"x" * 8, 0) for _ in range(3)] == [True, True, False]


def test_what_a_writer_lost_stands_before_what_waits() -> None:
    waiting = LogQueue(10, 1000)
    waiting.put(b"a", 1)
    assert waiting.take(100, 0) == QueuedLines(b"a", 1, 1)
    waiting.put(b"b", 2)
    waiting.lose(1)
    assert waiting.take(100, 0) == QueuedLines(b"", 1, 0, 1)
    assert waiting.take(100, 0) == QueuedLines(b"b", 1, 2)


def test_all_is_settled_when_it_is_recorded_or_reported_lost() -> None:
    waiting = LogQueue(1, 1000)
    waiting.put(b"a", 1)
    waiting.put(b"lost", 2)
    assert not waiting.wait_settled(0)
    waiting.take(100, 0)
    waiting.settle(1)
    assert not waiting.wait_settled(0)
    waiting.take(100, 0)
    waiting.settle(1)
    assert waiting.wait_settled(0)


def test_who_waits_for_lines_is_woken_at_the_end() -> None:
    waiting, found = LogQueue(1, 1000), []
    taker = threading.Thread(target=lambda: found.append(waiting.take(100)))
    taker.start()
    waiting.close()
    taker.join(30)
    assert found == [None]
    assert not waiting.put(b"late", 1)
