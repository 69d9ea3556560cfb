"""A writer's send window whose requests a test moves step by step, against a reference of the gateway."""

from __future__ import annotations

from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.source_request import Outcome, SourceAddress
from logferry.client.writing.send_window import Limits, SendJob
from logferry.client.writing.writer_core import WriterCore

from tests.support.fake_gateway import FakeGateway, Stored

ONE_A_BATCH = Limits(batch_bytes=1, in_flight=4)


class Sender:
    """A send window and the gateway that its requests go to. ``now`` is the clock; waiting moves it."""

    def __init__(self, limits: Limits = ONE_A_BATCH, gateway: FakeGateway | None = None, name: str = "s") -> None:
        self.gateway = gateway or FakeGateway()
        self.gateway.prev_always = False
        address = SourceAddress(GatewayCluster(["http://gw"], None), "tests", "t", name)
        self.core = WriterCore(address, {}, False, limits)
        self.window = self.core.window
        self.name = name
        self.now = 0.0
        self.written: list[bytes] = []

    @property
    def stored(self) -> Stored:
        return self.gateway.sources.get(self.name, Stored())

    def write(self, *seqnos: int | None) -> None:
        for seqno in seqnos:
            data = b"chunk %d\n" % len(self.written)
            self.window.put(data, seqno, 0, {})
            self.written.append(data)

    def begin(self) -> SendJob | None:
        """The next request, its body sent."""
        job = self.window.next_job(self.now)
        if job is not None:
            self.window.sent(job)
        else:
            due = self.window.due()
            assert due is None or due > self.now, "whoever asks again when it is due would ask without end"
        return job

    def arrive(self, job: SendJob, fault: str = "") -> Outcome:
        """What becomes of the request at the gateway."""
        self.gateway.faults.clear()
        self.gateway.faults.append(fault)
        return self.core.request(job).follow(self.gateway)

    def lost(self, job: SendJob) -> Outcome:
        """No answer came in time."""
        return self.arrive(job, "cut before")

    def turn(self, fault: str = "") -> SendJob:
        """One request, from its beginning to its answer; waits for it as long as it has to be waited for."""
        job = self.begin()
        if job is None:
            due = self.window.due()
            assert due is not None, "it waits for nothing"
            self.now = max(self.now, due)
            job = self.begin()
        assert job is not None
        self.window.take(job, self.arrive(job, fault), self.now)
        return job

    def drain(self) -> None:
        """Until all is acknowledged, or the writer has failed."""
        for _ in range(1000):
            if self.window.failure is not None or self.window.settled_count == self.window.put_count:
                return
            self.turn()
        raise AssertionError("it does not come to an end")

    def check(self) -> None:
        """The reports are true: all up to ``recorded`` is stored, nothing above what may be."""
        stored = [chunk.seqno for chunk in self.stored.chunks]
        recorded = self.window.recorded or 0
        assert recorded <= (self.stored.recorded or 0)
        above = [seqno for seqno in stored if seqno > recorded]
        unknown_to = self.window.unknown_to()
        assert not above or (unknown_to is not None and max(above) <= unknown_to)

    def assert_exact(self) -> None:
        assert self.stored.content() == b"".join(self.written)
        assert self.window.recorded == self.stored.recorded
        assert self.window.unknown_to() is None
        assert self.window.buffered_bytes == 0


def opened(limits: Limits = ONE_A_BATCH) -> Sender:
    sender = Sender(limits)
    sender.turn()
    return sender
