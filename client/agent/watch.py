"""Files → sources: which incarnation of which file is followed, from its discovery to its end.

While its descriptor is open a file is identified by device and inode: a rename changes only the path shown. After a
start the checkpoint's entry must match the file (`rotation.differs`), or the file is a new source. A file whose
content was replaced (`tail.FileChanged`) becomes a new source, too; what was read of the old one and is not
acknowledged yet is still sent under the old name.
"""

from __future__ import annotations

import os
import time

from logferry.client.agent.config import Config, FileGroup
from logferry.client.agent.looks import LiveFiles, Looks, Shared
from logferry.client.agent.schedule import NEVER
from logferry.client.agent.search import Search
from logferry.client.agent.source import FileSource
from logferry.client.events import log_event
from logferry.client.files.checkpoint import Checkpoint, CheckpointEntry
from logferry.client.files.compressed import find_gzip, grown_gzip
from logferry.client.files.discover import FileKey, find_moved, folder_is_on, leads_to, replace_lost_links
from logferry.client.files.identity import fingerprint, source_id
from logferry.client.files.rotation import KnownFiles, Suspects, copy_depth, differs
from logferry.client.files.tail import FileChanged, FileTail


class Watch:
    """The sources of a layer by name. One that was found, changed or replaced is put into ``ready``."""

    def __init__(self, config: Config, checkpoint: Checkpoint, shared: Shared) -> None:
        self._number, self._of_layer = shared.layers.join(lambda one: self._live.entry_of(one, self._known, self._lost))
        self.sources: dict[str, FileSource] = {}
        self._config, self._checkpoint, self._centres = config, checkpoint, shared.centres
        self.ready, self._deleted = shared.ready, shared.deleted
        self._suspects, self._started = Suspects(), False
        self.looks = Looks(not (config.once or config.check), shared.count)
        self.search = Search(config, self.looks.hints, shared.inputs, self._number)
        self.failed = self.search.failed
        self._live = LiveFiles(self._went, config.rotated_timeout_s)
        self._is_copy = checkpoint.adopt(config.host)
        replace_lost_links(checkpoint.entries.values())
        self.restless: dict[FileSource, None] = {}  # those that may be behind
        self._known = KnownFiles(checkpoint.entries.values(), checkpoint.note_boot())
        self._lost = KnownFiles((), False)  # live, and no pattern shows them

    def tick(self, now: float) -> None:
        """Finds new files (with ``--once`` only the first time) and checks those that are followed."""
        self.take_hints(now)
        if not self._started or (not self._config.once and self.search.is_due(now)):
            self._discover(now)
        for source in self.looks.due(now):
            self._look(source, now)

    def take_hints(self, now: float) -> None:
        """Looks at what changed, by inotify, since the last call."""
        if not self._started or self.looks.hints.unusable:
            return
        hints = self._live.noted(self.looks.hints.take())
        for key in (*self._live,) if hints.lost else hints.files:
            self.refresh(self._live.get(key), now)
        for path in dict.fromkeys(hints.paths):
            for found, (name, files) in self.search.appeared(path, now).items():
                self._shown(found, name, files, now, is_hint=True)
        self.search.gone(hints.gone, hints.lost or bool(self._suspects))

    def _look(self, source: FileSource, now: float) -> None:
        tail, is_changed = source.tail, False
        if tail is None:
            return
        try:
            is_changed, due = self.looks.look(tail, now)
        except FileChanged as change:
            self.renew(source, str(change), now)
            return
        except OSError as error:
            source.cannot_read(error, now, self._config.once)
            due, self.restless[source] = tail.next_look, None
            self.settle(source, now)  # it pauses: woken, it would be looked at again in the same round
        if tail.deleted_bytes:
            self._deleted.add(source, self._close)
        is_over = self.looks.is_over(source, tail, now) or tail.is_finished(now, self._config.rotated_timeout_s)
        if is_over and not source.busy:
            log_event("source-finished", source=source.name, bytes=tail.position)
            self._close(source, tail)
            return
        self.looks.put(source, self.looks.next_look(tail, due, now))
        if is_changed:
            self.wake(source, now)

    def refresh(self, source: FileSource | None, now: float, stale_s: float = -1.0) -> None:
        """Looks at the file now, if the last look was longer ago."""
        if source is not None and source.tail is not None and now - source.tail.looked_at > stale_s:
            source.tail.next_look = now
            self._look(source, now)

    def settle(self, source: FileSource, now: float) -> None:
        """The source had no request: it is asked again when it may have one, or dropped."""
        if source.tail is None and source.is_done() and not source.stopped:
            self._drop(source)
        else:
            self.ready.put(source, source.next_due(now, self._config.idle_s))

    def source_at(self, key: FileKey) -> FileSource | None:
        return self._live.get(key)

    def wake(self, source: FileSource, now: float) -> None:
        """It may have something to do."""
        self.ready.put(source, now)
        self.restless[source] = None

    def wake_all(self, now: float) -> None:
        """Also those that pause after a refusal: its cause may be gone."""
        for source in self.sources.values():
            source.retry(now)
            self.wake(source, now)

    def _close(self, source: FileSource, tail: FileTail) -> None:
        """Its bytes are no longer read. The request under way is completed, and ``finished`` is still reported."""
        self._suspects.is_over(tail, source.detach())
        self.looks.forget(tail)
        tail.close()
        self._live.forget(tail)
        self._checkpoint.changed.add(source.name)
        self.wake(source, tail.looked_at)

    def renew(self, source: FileSource, reason: str, now: float) -> None:
        """The file of ``source`` holds something else: that becomes a new source."""
        tail = source.tail
        begin = self._known.intact_to(tail, source.entry) if tail is not None and source.after_reboot else 0
        if tail is not None and not begin and self._move_to_copy(source, tail, reason, now):
            self._renew_file(tail, reason, source.files, now)
            return
        seen = tail.largest_size if tail is not None else source.reading.end
        kept = source.detach()
        if tail is not None:
            self._suspects.is_over(tail, kept)
        log_event("source-over", **source.entry.where, reason=reason, sent_to=kept, seen_to=seen)
        self._checkpoint.drop(source.name)
        self.wake(source, now)
        if source.is_done():
            self._drop(source)
        if tail is not None:
            self._renew_file(tail, reason, source.files, now, begin)

    def _move_to_copy(self, source: FileSource, tail: FileTail, reason: str, now: float) -> bool:
        wanted, once = source.wanted(tail), self._config.once
        copy = self._suspects.copy_of(wanted, tail, now) or wanted.find(self._is_another, now, once)
        if copy is None:
            return False
        copy.away_since = now  # until a pattern shows it
        log_event("source-copied", source=source.name, path=copy.path, reason=reason, position=copy.position)
        self._move(source, copy, now)
        return True

    def _is_continued(self, tail: FileTail, now: float) -> bool:
        """A source continues in it, see `LiveFiles.continued_in`."""
        source = self._live.continued_in(tail, self._lost)
        if source is None or source.tail is None:
            return False
        log_event("source-resumed", source=source.name, path=tail.path, position=tail.position)
        self._lost.remove(source.entry)
        self._close(source, source.tail)
        source.retry(now)  # the old mount may have been unreadable
        self._move(source, tail, now)
        return True

    def _went(self, source: FileSource, tail: FileTail, now: float, is_replaced: bool) -> None:
        """The file was removed while it was closed. What was written to it last may be in a copy, or in its ``.gz``."""
        self._close(source, tail)
        if is_replaced and self._move_to_copy(source, tail, "removed while it was closed", now):
            return
        reading = grown_gzip(source.entry, tail.path, self._config.patterns)
        if reading is None and tail.is_unwritten:
            log_event("source-finished", source=source.name, bytes=tail.position)
        elif reading is None:
            log_event("file-gone", **source.entry.where, position=tail.position)
        else:
            log_event("source-resumed", source=source.name, path=reading.path, position=tail.position)
            source.reading, (source.entry.device, source.entry.inode) = reading, reading.key

    def _move(self, source: FileSource, to: FileTail, now: float) -> None:
        source.move_to(to)
        self._live[to.key] = source
        self.looks.put(source, now)
        self.wake(source, now)
        self._checkpoint.changed.add(source.name)

    def _is_another(self, tail: FileTail) -> bool:
        """It is known as the file of a source. An inode that a new file uses again does not count."""
        return self._live.owner(tail.key, tail.path, tail.looked_at) is not None or self._known.fits(tail)

    def _renew_file(self, tail: FileTail, reason: str, files: FileGroup, now: float, begin: int = 0) -> None:
        """The followed file as a new source, from its beginning, or from ``begin`` on."""
        try:
            renewed = tail.renewed(now)
        except OSError as error:  # the next search finds it again
            self.search.fails(tail.path, error)
            self.search.soon()
            self._live.forget(tail)
            self.looks.forget(tail)
            tail.close()
            return
        self._start(renewed, reason, files, begin)

    def close(self) -> None:
        for source in self.sources.values():
            source.reading.close()
        self._suspects.close()
        self.looks.hints.close()

    # ---- finding files -----------------------------------------------------------------------------------

    def _discover(self, now: float) -> None:
        found = self.search.all(now)
        for key, entry in () if self._started else self._known.rest():
            if key not in found and self._known.is_replaced(entry, now):
                self._take_up_copy(entry, now)  # before it is found as an unknown file
        self._lost = KnownFiles((source.entry for key, source in self._live.items() if key not in found), False)
        for key, (path, files) in sorted(found.items(), key=lambda f: (f[0] not in self._known, copy_depth(f[1][0]))):
            self._shown(key, path, files, now)
        self._live.hidden(found, now, self._checkpoint.changed)
        self._suspects.forget(self._live)
        for tail in self._suspects.gone(found, now):
            if (begin := self._begin_of(tail, now, gone=True)) is not None:
                tail.away_since = now
                files = self._config.group_of(tail.path)
                self._start(tail, "first seen; it is gone", self._of_layer(tail, files) or files, begin)
        self.search.keep_failed({path for path, _ in found.values()})
        if not self._started:
            self._first_time(bool(found), now)
        self._started = True
        self.search.done(now, bool(self._suspects))

    def _shown(self, key: FileKey, path: str, files: FileGroup, now: float, is_hint: bool = False) -> None:
        """A pattern shows the file under this path; as a hint, perhaps under its old one, too, which it keeps then."""
        source = self._live.owner(key, path, now)
        if source is None:
            self._take_up(path, files, now)
        elif source.tail is not None and (source.tail.path, source.tail.away_since) != (path, None):
            if is_hint and source.tail.away_since is None and leads_to(source.tail.path, key):
                return
            self._live.shown(source, source.tail, path)
            self._checkpoint.changed.add(source.name)

    def _first_time(self, any_found: bool, now: float) -> None:
        """Files that the patterns do not show: they were renamed or removed while the client was down."""
        self.search.log_missing(any_found)
        for key, entry in self._known.rest():
            if key not in self._known:
                continue
            moved = find_moved(entry.last_path, key)
            is_there = moved in (entry.last_path, os.path.realpath(entry.last_path)) and key not in self._live
            if is_there and not entry.away:  # no pattern or no topic has it, or its device has another number
                if self._known.is_replaced(entry, now):
                    self._take_up_copy(entry, now)
                continue
            files = self._config.group_of(entry.path, entry.topic)
            if (moved is not None and self._take_up(moved, files, now, away=True)) or self._take_up_compressed(entry):
                continue
            if folder_is_on(entry.last_path, entry.device):  # else it may be mounted again
                log_event("file-gone", **entry.where, position=entry.position)
                self._known.remove(entry)
                self._over(entry)

    def _take_up_copy(self, entry: CheckpointEntry, now: float) -> bool:
        """Resumes in the copy that was made while the client was down; one that holds less than was sent is new."""
        copy = self._known.copy_of(entry, self._is_another, now, self._config.once)
        if copy is None:
            return False
        copy.away_since = now
        self._known.remove(entry)
        files = self._config.group_of(entry.path, entry.topic)
        if copy.position < entry.position:
            reason = f"its copy {copy.path} has other bytes, or none, at the end of what was sent"
            log_event("source-over", source=entry.source_id, reason=reason, sent_to=entry.position)
            self._over(entry)
            self._start(copy, "a copy of a known file", files, copy.position)
            return True
        entry.born_ns = copy.born_ns
        log_event("source-copied", source=entry.source_id, path=copy.path, reason="at the start")
        self._checkpoint.drop(entry.source_id)  # put behind one whose inode it has now: the last one counts
        self._resume(copy, entry, files)
        self.sources[entry.source_id].unsaved = True
        return True

    def _take_up_compressed(self, entry: CheckpointEntry) -> bool:
        """Resumes in the ``.gz`` that it became while the client was down."""
        reading = find_gzip(entry, self._config.patterns)
        if reading is None:
            return False
        log_event("source-resumed", source=entry.source_id, path=reading.path, position=entry.position)
        self._known.remove(entry)
        entry.device, entry.inode = reading.key  # its own belong to another file by now
        (source := self._over(entry)).reading = reading
        source.batches.resume(source.reading, self._checkpoint.cuts.get(source.name, []), source.after_reboot)
        return True

    def _begin_of(self, tail: FileTail, now: float, gone: bool = False) -> int | None:
        """Where to begin with an unknown file; None: it may be a copy in the making, and waits."""
        likely = self._live.tails_like(tail, self._suspects.similar_to(tail))
        return self._suspects.begin_of(tail, likely, now, self._config.once or self._config.check, gone)

    def _take_up(self, path: str, files: FileGroup, now: float, away: bool = False) -> bool:
        """Begins to follow the file. ``away``: only if it is the one of the checkpoint. False: it is not followed."""
        tail = self.search.open(path, files, self._known, now)
        if tail is None:
            return False
        is_live = self._live.owner(tail.key, tail.path, now) is not None  # renamed since its name was found
        of_layer = files if away else self._of_layer(tail, files)
        if of_layer is None or is_live:
            tail.close()
            return False
        files, entry = of_layer, self._known.candidate(tail)
        reason, is_other, intact = "first seen", False, 0
        if entry is None and self._is_continued(tail, now):
            return True
        if entry is None and not away:
            begin = self._begin_of(tail, now)
            if begin is None:
                return False
            if begin:
                reason, intact = "a copy of a followed file", begin
            elif files.starts_at_end and not self._started:
                intact = self.search.end_of(tail, self._checkpoint.saved_ns)
        if entry is not None and entry.head.length:
            reason = differs(tail, entry)
            is_other = bool(reason)
            intact = self._known.intact_to(tail, entry) if is_other and not away else 0
            if not reason and not away and entry.topic not in ("", files.topic):
                reason = f"its topic is {files.topic} now"
        if away and reason:
            tail.close()
            return False
        if entry is not None:
            self._known.remove(entry)
        if entry is not None and not reason:
            tail.away_since = now if away else None
            self._resume(tail, entry, files)
            return True
        if entry is not None and not entry.head.length:
            self._checkpoint.drop(entry.source_id)
        elif entry is not None and not (
            is_other and not intact and (self._take_up_copy(entry, now) or self._take_up_compressed(entry))
        ):
            log_event("source-over", **entry.where, reason=reason, sent_to=entry.position)
            self._over(entry)
        if tail.key in self._live:  # it has the inode of the file whose copy it is, and continues it
            tail.close()
            return True
        self._start(tail, reason, files, intact)
        return True

    # ---- sources -----------------------------------------------------------------------------------------

    def _resume(self, tail: FileTail, entry: CheckpointEntry, files: FileGroup) -> None:
        tail.head = entry.head
        entry.device, entry.inode = tail.key
        entry.topic = entry.topic or files.topic
        log_event("source-resumed", source=entry.source_id, path=tail.path, position=entry.position)
        source = self._add(entry, tail, files, "known")
        source.unsaved = self._is_copy  # the new name
        source.after_reboot = self._known.rebooted and not files.source  # a spool is on the disk before it is sent
        source.batches.resume(source.reading, self._checkpoint.cuts.get(source.name, []), source.after_reboot)

    def _start(self, tail: FileTail, reason: str, files: FileGroup, begin: int = 0) -> None:
        """A new source. ``begin``: another one sent what lies before it, or nobody is to."""
        begin = tail.begin_at(max(begin, tail.begin))
        name = source_id(self._config.host, tail.path, self._checkpoint.next_generation(), files.source)
        seen_ms, mark = int(time.time() * 1000), fingerprint(tail.mark)
        entry = CheckpointEntry(name, tail.path, tail.path, *tail.key, tail.head, begin, mark, seen_ms)
        entry.born_ns, entry.topic, entry.since, entry.marks = tail.born_ns, files.topic, begin, tail.earlier_marks()
        reason += f"; it begins at position {begin}" if begin else ""
        log_event("source-new", **entry.where, size=tail.size, reason=reason)
        self._add(entry, tail, files, reason)

    def _over(self, entry: CheckpointEntry) -> FileSource:
        """Its file is gone, or is another one: only ``finished`` is left to report."""
        files = self._config.group_of(entry.path, entry.topic)
        entry.topic = entry.topic or files.topic
        return self._add(entry, None, files)

    def _add(self, entry: CheckpointEntry, tail: FileTail | None, files: FileGroup, why: str = "") -> FileSource:
        source = FileSource(entry, tail, self._config, files, self._centres)
        source.why, source.layer = why, self._number
        if tail is not None:
            self._live[tail.key] = source
            self.looks.put(source, 0.0)
        self._checkpoint.put(entry)
        self.sources[source.name] = source
        self.wake(source, 0.0)
        return source

    def _drop(self, source: FileSource) -> None:
        """All of it was sent and, if that is configured, reported as finished."""
        source.reading.close()
        self.ready.put(source, NEVER)
        self.sources.pop(source.name, None)
        self._checkpoint.drop(source.name)
