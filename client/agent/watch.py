"""Files → sources: which incarnation of which file is followed, from its discovery to its end.

A file is known by device and inode while its descriptor is open: a rename changes nothing but the path shown.
After a start the checkpoint's entry must fit the file (`fingerprint.differs`), or the file is a new source. A
file that held something else behind our back (`tail.Changed`) becomes a new source, too; what of the old
one was read and is not acknowledged yet is still sent under the old name.
"""

from __future__ import annotations

import fnmatch
import time

from logferry.client.agent.config import Config, Files
from logferry.client.agent.failover import Centres
from logferry.client.agent.source import Source
from logferry.client.events import tell
from logferry.client.files.checkpoint import Checkpoint, Entry
from logferry.client.files.chunking import Limits
from logferry.client.files.compressed import find_compressed
from logferry.client.files.discover import COMPRESSED, FileKey, find, find_moved, folder_is_on, missing
from logferry.client.files.fingerprint import of
from logferry.client.files.source_names import attribute, printable, source_id
from logferry.client.files.tail import Changed, Tail

# Looking for files takes at most this share of the time, however many there are.
DISCOVERY_SHARE = 0.02


class Watch:
    """The sources, in the order in which they are served."""

    def __init__(self, config: Config, checkpoint: Checkpoint, centres: Centres) -> None:
        self.sources: dict[str, Source] = {}
        self.failed: dict[str, str] = {}  # path → why it could not be read
        self._config = config
        self._checkpoint = checkpoint
        self._centres = centres
        self._live: dict[FileKey, Source] = {}
        self._files: dict[str, Files] = {}  # by sourceId
        self._known = {(entry.device, entry.inode): entry for entry in checkpoint.entries.values()}
        self._next_discovery = 0.0
        self._started = False

    def tick(self, now: float) -> None:
        """Looks for new files (with ``--once`` only the first time) and at those that are followed."""
        if not self._started or (not self._config.once and now >= self._next_discovery):
            self._discover(now)
        for source in list(self.sources.values()):
            tail = source.tail
            if tail is None:
                if source.is_done():
                    self._drop(source)
                continue
            try:
                tail.look(now)
            except Changed as change:
                self.renew(source, str(change), now)
                continue
            except OSError as error:
                source.cannot_read(error, now, self._config.once)
                continue
            if tail.is_finished(now, self._config.rotated_s) and not source.busy:
                tell("source-finished", source=source.name, bytes=tail.position)
                self._close(source, tail)
        self._bound_deleted()

    def _bound_deleted(self) -> None:
        """Who deletes logs wants the room. Beyond the limit what was sent goes first, then the oldest."""
        deleted = [(s, s.tail) for s in self.sources.values() if s.tail is not None and s.tail.deleted_bytes]
        too_many = sum(tail.deleted_bytes for _, tail in deleted) - self._config.deleted_bytes
        deleted.sort(key=lambda pair: (pair[1].position < pair[1].size, pair[1].away_since or pair[1].looked_at))
        for source, tail in deleted:
            if too_many <= 0:
                break
            too_many -= tail.deleted_bytes
            self._close(source, tail)
            if source.reading.end < tail.size:
                tell("deleted-dropped", source=source.name, sent_to=source.reading.end, size=tail.size)

    def _close(self, source: Source, tail: Tail) -> None:
        """Its bytes are not read any more; what is under way goes on, and that it is finished is still said."""
        source.detach()
        tail.close()
        del self._live[tail.key]

    def renew(self, source: Source, reason: str, now: float) -> None:
        """``source`` cannot go on in its file: what the file holds now becomes a new source."""
        tail, files = source.tail, self._files.get(source.name)
        seen = tail.largest_size if tail is not None else source.reading.end
        kept = source.detach()
        tell("source-over", source=source.name, reason=reason, sent_to=kept, seen_to=seen)
        self._checkpoint.entries.pop(source.name, None)
        if source.is_done():
            self._drop(source)
        if tail is not None and files is not None:
            self._start(tail.renewed(now), reason, files)

    def close(self) -> None:
        for source in self.sources.values():
            source.reading.close()

    # ---- finding files -----------------------------------------------------------------------------------

    def _discover(self, now: float) -> None:
        began = time.perf_counter()
        found = self._find()
        for key, (path, files) in found.items():
            source = self._live.get(key)
            if source is None:
                self._take_up(path, files, now)
            elif source.tail is not None:
                source.tail.path, source.tail.away_since = path, None
        for key, source in self._live.items():
            if key not in found and source.tail is not None and source.tail.away_since is None:
                source.tail.away_since = now
                tell("source-away", source=source.name, size=source.tail.size)
        if not self._started:
            self._first_time(bool(found), now)
        self._started = True
        pause_s = max(self._config.linger_s, (time.perf_counter() - began) / DISCOVERY_SHARE)
        self._next_discovery = now + pause_s

    def _find(self) -> dict[FileKey, tuple[str, Files]]:
        """Each file belongs to the first entry of the configuration that it fits."""
        found: dict[FileKey, tuple[str, Files]] = {}
        for files in self._config.files:
            for key, path in find(files.patterns, self._config.state_dir, files.exclude).items():
                found.setdefault(key, (path, files))
        return found

    def _first_time(self, any_found: bool, now: float) -> None:
        """What the patterns do not show: files that were renamed while the client was down, or are gone."""
        absent = missing(self._config.patterns)
        for path in absent if self._config.once else ():
            tell("file-missing", path=path)
            self.failed[path] = "not there"
        if not any_found and not (absent and self._config.once):
            tell("nothing-matches", patterns=" ".join(self._config.patterns))
        for key, entry in list(self._known.items()):
            moved = find_moved(entry.last_path, key)
            if moved == entry.last_path and not entry.away:
                continue  # it is there, but no pattern asks for it any more
            if moved is not None and self._take_up(moved, self._files_of(entry), now, away=True):
                continue
            if self._take_up_compressed(entry):
                self._known.pop(key, None)
            elif folder_is_on(entry.last_path, entry.device):  # else it may be mounted again
                tell("file-gone", source=entry.source_id, position=entry.position)
                self._known.pop(key, None)
                self._over(entry)

    def _take_up_compressed(self, entry: Entry) -> bool:
        """Goes on in the ``.gz`` that it became while the client was down, unless such are sources themselves."""
        if any(pattern.endswith(COMPRESSED) for pattern in self._config.patterns):
            return False
        reading = find_compressed(entry)
        if reading is None:
            return False
        tell("source-resumed", source=entry.source_id, path=reading.path, position=entry.position)
        entry.device, entry.inode = reading.key  # its own are another file's by now
        source = self._over(entry)
        source.reading = reading
        self._go_on_after_its_cut(source)
        return True

    def _files_of(self, entry: Entry) -> Files:
        """Which entry of the configuration a file belonged to that no pattern shows any more: the likeliest."""
        same = [files for files in self._config.files if files.topic == entry.topic] or list(self._config.files)
        for files in same:
            if any(fnmatch.fnmatchcase(entry.path, pattern.replace("**/", "*")) for pattern in files.patterns):
                return files
        return same[0]

    def _take_up(self, path: str, files: Files, now: float, away: bool = False) -> bool:
        """Begins to follow the file. ``away``: only if it is the one that the checkpoint knows."""
        try:
            tail = Tail.open(path, now, self._config.once)
        except OSError as error:
            if path not in self.failed:
                tell("file-unreadable", path=path, reason=error.strerror)
            self.failed[path] = error.strerror or "unreadable"
            return False
        self.failed.pop(path, None)
        if tail is None:
            return False
        if tail.key in self._live:  # renamed between the look at its name and this one
            tail.close()
            return False
        entry = self._known.get(tail.key)
        reason, is_other = "first seen", False
        if entry is not None and entry.head.length:
            reason = _differs(tail, entry)
            is_other = bool(reason)
            if not reason and not away and entry.topic not in ("", files.topic):
                reason = f"it goes to the topic {files.topic} now"
        if away and reason:
            tail.close()
            return False
        if entry is not None:
            del self._known[tail.key]
        if entry is not None and not reason:
            tail.away_since = now if away else None
            self._resume(tail, entry, files)
            return True
        if entry is not None and not entry.head.length:
            self._checkpoint.entries.pop(entry.source_id, None)
        elif entry is not None and not (is_other and self._take_up_compressed(entry)):
            tell("source-over", source=entry.source_id, reason=reason, sent_to=entry.position)
            self._over(entry)
        self._start(tail, reason, files)
        return True

    # ---- sources -----------------------------------------------------------------------------------------

    def _resume(self, tail: Tail, entry: Entry, files: Files) -> None:
        tail.head = entry.head
        entry.topic = entry.topic or files.topic
        tell("source-resumed", source=entry.source_id, path=tail.path, position=entry.position)
        source = self._follow(tail, entry, files, "known")
        source.unsaved = False
        self._go_on_after_its_cut(source)

    def _go_on_after_its_cut(self, source: Source) -> None:
        cut = self._checkpoint.cuts.get(source.name)
        if cut is not None:
            source.go_on_after(cut)

    def _start(self, tail: Tail, reason: str, files: Files) -> None:
        generation = self._checkpoint.next_generation()
        name = source_id(self._config.host, tail.path, generation)
        device, inode = tail.key
        entry = Entry(name, tail.path, tail.path, device, inode, tail.head, 0, of(b""), int(time.time() * 1000))
        entry.born_ns, entry.topic = tail.born_ns, files.topic
        tell("source-new", source=name, size=tail.size, reason=reason)
        self._follow(tail, entry, files, reason)

    def _follow(self, tail: Tail, entry: Entry, files: Files, why: str) -> Source:
        source = self._source(entry, tail, files)
        source.why = why
        self._add(source)
        self._files[source.name] = files
        self._live[tail.key] = source
        return source

    def _over(self, entry: Entry) -> Source:
        """Its file is gone, or is another: what is left is to say so."""
        files = self._files_of(entry)
        entry.topic = entry.topic or files.topic
        source = self._source(entry, None, files)
        self._add(source)
        return source

    def _source(self, entry: Entry, tail: Tail | None, files: Files) -> Source:
        attributes = self._attributes(entry, files)
        return Source(entry, tail, self._limits(files), attributes, self._centres, self._heartbeat_s())

    def _attributes(self, entry: Entry, files: Files) -> dict[str, str]:
        return {"host": printable(self._config.host), "path": attribute(entry.path), **files.attributes}

    def _limits(self, files: Files) -> Limits:
        config = self._config
        sizes = config.chunk_bytes, config.line_bytes, config.request_bytes
        return Limits(*sizes, files.record_start, files.cut_lines)

    def _heartbeat_s(self) -> float:
        return 0.0 if self._config.once else self._config.heartbeat_s

    def _add(self, source: Source) -> None:
        self._checkpoint.entries[source.name] = source.entry
        self.sources[source.name] = source

    def _drop(self, source: Source) -> None:
        """All of it was sent and, where that is wanted, said to be finished."""
        source.reading.close()
        self.sources.pop(source.name, None)
        self._files.pop(source.name, None)
        self._checkpoint.entries.pop(source.name, None)


def _differs(tail: Tail, entry: Entry) -> str:
    """Why the file is not the incarnation that the checkpoint knows; empty when it is."""
    if tail.born_ns and entry.born_ns and tail.born_ns != entry.born_ns:
        return "another file, made later, has its inode"
    return tail.differs(entry.head, entry.position, entry.mark)
