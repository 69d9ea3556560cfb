"""The inputs of a running client: their spools, their threads, and when space of the spools is freed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Protocol

from logferry.client.events import log_event
from logferry.client.files.checkpoint import CheckpointEntry, StateUnusable
from logferry.client.files.discover import FileKey
from logferry.client.files.tail import FileTail
from logferry.client.inputs.counters import InputCounters
from logferry.client.inputs.settings import InputSettings
from logferry.client.inputs.spool import Spool

FOLDER, SUFFIX = "spool", ".spool"
CLOSE_S = 3.0
EntriesAt = Callable[[FileKey], Sequence[CheckpointEntry]]  # of a spool's sources, one for each topic


class Input(Protocol):
    """Puts into its spool, from a thread of its own."""

    def start(self) -> None:
        """Raises OSError."""

    def reload(self) -> None:
        """Reads files again that it uses; an error is logged."""

    def close(self, timeout_s: float) -> None:
        """Nothing more is taken."""


def spool_path(state_dir: str, name: str) -> str:
    return os.path.join(state_dir, FOLDER, f"{name}{SUFFIX}")  # noqa: PTH118


class Inputs:
    """``spools``: by their paths. Empty where no input is configured."""

    def __init__(self) -> None:
        self.spools: dict[str, Spool] = {}
        self._inputs: list[Input] = []
        self._counters: list[InputCounters] = []
        self._ends: dict[str, int] = {}

    @classmethod
    def open(cls, settings: Sequence[InputSettings], state_dir: str) -> Inputs:
        """Begins to take. The state folder is locked by the caller. Raises `StateUnusable` or OSError."""
        found = cls()
        folder = Path(state_dir, FOLDER)
        names = {f"{each.name}{SUFFIX}" for each in settings}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if path.name not in names:
                log_event("spool-left", path=path, size=path.stat().st_size)
        try:
            for each in settings:
                found._add(each, spool_path(state_dir, each.name))
        except BaseException:
            found.close()
            raise
        return found

    def _add(self, settings: InputSettings, path: str) -> None:
        spool = Spool(Path(path), settings.spool_bytes, of_lines=settings.kind != "stdin")
        spool.open()
        self.spools[path] = spool
        counters = InputCounters(settings.name, settings.kind, spool)
        made = _input(settings, spool, counters)
        self._inputs.append(made)
        self._counters.append(counters)
        try:
            made.start()
        except OSError as error:
            raise StateUnusable(f"input {settings.name}: {error.strerror or error}") from None

    def open_file(self, path: str, now: float, once: bool) -> FileTail | None:
        """As `FileTail.open`, also of a spool."""
        spool = self.spools.get(path)
        return FileTail.open(path, now, once) if spool is None else spool.tail(now)

    @property
    def are_over(self) -> bool:
        """None will take more, and what they took is in the spools; also where there are none."""
        return all(spool.is_over and spool.is_empty for spool in self.spools.values())

    def news(self) -> list[FileKey]:
        """The spools that grew since the last call."""
        ends, self._ends = self._ends, {path: spool.end for path, spool in self.spools.items()}
        return [self.spools[path].key for path, end in self._ends.items() if ends.get(path) != end]

    def check(self) -> None:
        """Raises what ended a thread: a defect."""
        for counters in self._counters:
            if counters.defect is not None:
                raise counters.defect

    def reload(self) -> None:
        for each in self._inputs:
            each.reload()

    def status(self) -> list[dict[str, Any]]:
        return [counters.status() for counters in self._counters]

    @property
    def is_pressed(self) -> bool:
        """A spool is so full that its space should be freed soon."""
        return any(spool.used_bytes > spool.limit // 2 for spool in self.spools.values())

    def before_save(self, entries_at: EntriesAt) -> list[str]:
        """Plans what to free: what all topics have. Returns the sources whose entries must be stored before `saved`."""
        changed = []
        for spool in self.spools.values():
            entries = entries_at(spool.key)
            target = spool.free_to(min((entry.position for entry in entries), default=0))
            for entry in entries:
                if target > entry.since:
                    entry.since = target
                    changed.append(entry.source_id)
        return changed

    def saved(self, entries_at: EntriesAt) -> None:
        for spool in self.spools.values():
            entries = entries_at(spool.key)
            if entries:
                spool.free(min(entry.position for entry in entries))

    def close(self) -> None:
        """What was taken is in the spools afterwards, as far as their disk takes it."""
        for each in self._inputs:
            each.close(CLOSE_S)
        for spool in self.spools.values():
            spool.close(CLOSE_S)


def _input(settings: InputSettings, spool: Spool, counters: InputCounters) -> Input:
    """Imports only what is configured: asyncio alone takes megabytes."""
    if settings.kind == "stdin":
        from logferry.client.inputs.standard_input import StandardInput

        return StandardInput(spool, counters)
    if settings.kind == "syslog":
        from logferry.client.inputs.syslog_server import SyslogInput

        return SyslogInput(spool, counters, settings.listen, settings.message_bytes, settings.certificates)
    from logferry.client.inputs.journal import JournalInput, journal_command

    command = journal_command(settings.units, settings.directory, settings.namespace)
    return JournalInput(spool, counters, command, settings.from_end)
