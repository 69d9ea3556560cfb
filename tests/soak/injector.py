"""Carries out the faults of a plan. Each ends by itself."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import aiohttp
from aiokafka.admin import AIOKafkaAdminClient
from logferry.client.files.checkpoint import Checkpoint

from tests.soak.files import HostFile, is_in_checkpoints
from tests.soak.links import Mode
from tests.soak.plan import BROKERS, DCS, TOPIC, Fault
from tests.soak.world import Span, World

_MOST_PARTITIONS: Final = 8
_MOST_COPIES: Final = 2
_FULL_BYTES: Final = 1 << 10


class Injector:
    """``done`` counts them by kind, ``skipped`` those that were not possible, by kind and reason.

    ``files`` by host; ``copied``: for each client on a copied state folder its host, and the lines of each log then.
    """

    def __init__(self, world: World, files: dict[str, list[HostFile]]) -> None:
        self._world, self._files = world, files
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.copied: dict[str, tuple[str, dict[str, int]]] = {}
        self.topics_made: list[str] = []
        self.partitions = dict.fromkeys(DCS, 3)
        self._clock = asyncio.Lock()
        self._rng = random.Random(0)
        verbs: dict[str, Callable[[Fault], Awaitable[str | None]]] = {
            "killed": self._kill,
            "frozen": self._freeze,
            "cut": self._cut,
            "refused": self._disturb,
            "silent": self._disturb,
            "slow": self._disturb,
            "answers lost": self._disturb,
            "all brokers killed": self._kill_brokers,
            "min ISR lost": self._kill_brokers,
            "all brokers frozen": self._freeze_brokers,
            "disk full": self._fill_disk,
            "clock shifted": self._shift_clock,
            "topic created and deleted": self._make_topic,
            "partition added": self._add_partition,
            "tokens changed": self._change_tokens,
            "certificate changed": self._change_certificate,
            "state folder copied": self._copy_state,
            "host rebooted": self._reboot,
            "file rotated": self._rotate,
        }
        self._verbs = verbs

    async def do(self, fault: Fault) -> None:
        """Returns when it is over."""
        verb = self._verbs.get(fault.kind) or self._verbs[fault.kind.rpartition(" ")[2]]
        span = Span(f"{fault.kind}: {fault.target}", self._world.elapsed_s)
        self._world.timeline.append(span)
        try:
            reason = await verb(fault)
        finally:
            span.to_s = self._world.elapsed_s
        if reason is None:
            self.done[fault.kind] += 1
        else:
            self.skipped[f"{fault.kind} ({reason})"] += 1

    # ---- processes ---------------------------------------------------------------------------------------------------

    async def _kill(self, fault: Fault) -> str | None:
        target = self._world.controller(fault.target) if fault.kind == "controller killed" else fault.target
        return None if self._world.send(target, signal.SIGKILL) else "not running"

    async def _freeze(self, fault: Fault) -> str | None:
        pid = self._world.pid(fault.target)
        if pid is None or not self._world.send(fault.target, signal.SIGSTOP):
            return "not running"
        await asyncio.sleep(fault.seconds)
        if self._world.pid(fault.target) == pid:
            self._world.send(fault.target, signal.SIGCONT)
        return None

    async def _kill_brokers(self, fault: Fault) -> str | None:
        """All of a data centre, or two of three."""
        nodes = [f"{fault.target}/kafka-{node}" for node in BROKERS]
        if fault.kind == "min ISR lost":
            nodes.pop(int(fault.draw * len(nodes)))
        self._world.held.update(nodes)
        try:
            for node in nodes:
                self._world.send(node, signal.SIGKILL)
            await asyncio.sleep(fault.seconds)
        finally:
            self._world.held.subtract(nodes)
        return None

    async def _freeze_brokers(self, fault: Fault) -> str | None:
        nodes = [fault._replace(target=f"{fault.target}/kafka-{node}") for node in BROKERS]
        results = await asyncio.gather(*(self._freeze(node) for node in nodes))
        return None if None in results else "not running"

    # ---- network, disk, clock ----------------------------------------------------------------------------------------

    async def _cut(self, fault: Fault) -> str | None:
        self._world.links[fault.target].cut()
        return None

    async def _disturb(self, fault: Fault) -> str | None:
        await self._world.links[fault.target].disturb(cast(Mode, fault.kind), fault.seconds)
        return None

    async def _fill_disk(self, fault: Fault) -> str | None:
        """No file of the process may grow beyond 1 KiB (RLIMIT_FSIZE): a write fails as on a full disk (EFBIG)."""
        before: dict[int, tuple[int, int]] = {}
        for pid in self._world.pids(fault.target):
            with suppress(ProcessLookupError):
                before[pid] = _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
        await asyncio.sleep(fault.seconds if before else 0)
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        return None if before else "not running"

    async def _shift_clock(self, fault: Fault) -> str | None:
        """Of a gateway or a client: what Python's clock returns; its timers run on."""
        if self._clock.locked():
            return "one at a time"
        async with self._clock:
            self._world.set_clock(fault.target, round((fault.draw * 2 - 1) * 300))
            await asyncio.sleep(fault.seconds)
            self._world.set_clock(fault.target, 0)
        return None

    # ---- topics, tokens, certificates --------------------------------------------------------------------------------

    async def _make_topic(self, fault: Fault) -> str | None:
        name = f"extra-{len(self.topics_made)}"
        self.topics_made.append(name)
        try:
            await self._put(fault.target, name, 2)
            await asyncio.sleep(fault.seconds)
            admin = AIOKafkaAdminClient(bootstrap_servers=self._world.bootstrap(fault.target))
            async with asyncio.timeout(20):
                await admin.start()
                try:
                    await admin.delete_topics([f"{fault.target}.{name}"])
                finally:
                    await admin.close()
        except Exception as error:  # noqa: BLE001 - Kafka is disturbed, too; what is left does no harm
            return f"not finished: {type(error).__name__}"
        return None

    async def _add_partition(self, fault: Fault) -> str | None:
        if self.partitions[fault.target] >= _MOST_PARTITIONS:
            return "enough of them"
        try:
            await self._put(fault.target, TOPIC, self.partitions[fault.target] + 1)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"not finished: {type(error).__name__}"
        self.partitions[fault.target] += 1
        return None

    async def _put(self, dc: str, topic: str, partitions: int) -> None:
        url = f"{self._rng.choice(self._world.urls[dc])}/v1/topics/{topic}"
        headers, timeout = self._world.authorization, aiohttp.ClientTimeout(20)
        body = {"partitions": partitions}
        async with self._world.session.put(url, json=body, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()

    async def _change_tokens(self, fault: Fault) -> str | None:
        """A new token in all gateways, then in the clients, which are restarted by SIGTERM."""
        self._world.security.change_tokens()
        for dc in DCS:
            self._world.write_gateway(dc)
            self._world.send(f"{dc}/gateway", signal.SIGHUP)
        for client in self._world.clients:
            self._world.send(client, signal.SIGTERM)
        return None

    async def _change_certificate(self, fault: Fault) -> str | None:
        self._world.security.new_certificate(fault.target)
        self._world.send(f"{fault.target}/gateway", signal.SIGHUP)
        return None

    # ---- hosts -------------------------------------------------------------------------------------------------------

    async def _copy_state(self, fault: Fault) -> str | None:
        """A second client under another host name, on the same files and a copy of the state folder."""
        host = fault.target
        if len(self.copied) >= _MOST_COPIES:
            return "enough of them"
        if not (self._world.clients[host] / "checkpoint.json").exists():
            return "no checkpoint yet"
        name = f"{host}-copy{len(self.copied)}"
        self.copied[name] = (host, {file.log: file.number for file in self._files[host]})
        self._world.start_client(name, host, self._files[host], copied_from=host)
        return None

    async def _reboot(self, fault: Fault) -> str | None:
        """The client is killed; it comes back on devices with other numbers, after another start of the system."""
        host = fault.target
        self._world.held[host] += 1
        try:
            self._world.send(host, signal.SIGKILL)
            await asyncio.to_thread(self._world.children[host].wait_for_end)
            await asyncio.to_thread(renumber_devices, self._world.clients[host])
            await asyncio.sleep(fault.seconds)
        finally:
            self._world.held[host] -= 1
        return None

    async def _rotate(self, fault: Fault) -> str | None:
        host, _, mode = fault.target.partition("/")
        states = [self._world.clients[name] for name in [host, *self.copied] if name.startswith(host)]
        (file,) = (file for file in self._files[host] if file.mode == mode)
        if not file.rotate(lambda path: is_in_checkpoints(states, path)):
            return "file not known yet"
        return None


def renumber_devices(state_dir: Path) -> None:
    """The checkpoint as it is after a reboot that gave the devices other numbers."""
    checkpoint = Checkpoint.open(state_dir)
    checkpoint.boot = f"soak-{time.time_ns()}"
    for entry in checkpoint.entries.values():
        entry.device += 1
    checkpoint.save()
    checkpoint.close()
