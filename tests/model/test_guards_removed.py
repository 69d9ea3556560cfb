"""Each guard taken out of a copy of the code, and the tests that must notice it.

A mutation is a text of a module and what takes its place. A test that passes without its guard proves nothing. The
guards of the lane's model are in `test_lane_model`, those that need Kafka in ``tests/crash``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_COPIED = ("gateway", "mirror", "loaders", "client", "ops", "tests", "pyproject.toml")
_FAILED = 1  # pytest: tests ran, and some failed


class Guard(NamedTuple):
    """``text`` of ``module``, which becomes ``without``, and the ``tests`` that fail then."""

    name: str
    module: str
    text: str
    without: str
    tests: str


GUARDS = [
    Guard(
        "nothing is sent that a reboot would double",
        "client/agent/agent.py",
        "not source.unsaved and (is_logged or job.batch is None)",
        "not source.unsaved",
        "tests/unit/client/agent/test_agent_checkpoint.py",
    ),
    Guard(
        "the farewell follows the session in the next data centre",
        "client/agent/source.py",
        "is_moved = window.session is not None or self._heartbeat.is_over",
        "is_moved = True",
        "tests/unit/client/agent/test_agent_centres.py",
    ),
    Guard(
        "a leader without the record of the fence is not believed",
        "gateway/lanes/replay.py",
        "LATEST)) < up_to:",
        "LATEST)) < 0:",
        "tests/unit/lanes/test_lane_alone.py",
    ),
    Guard(
        "who writes again is not finished",
        "gateway/lanes/dedup.py",
        "if beat is not None and beat.finished else beat",
        "if False else beat",
        "tests/unit/lanes/test_dedup.py",
    ),
    Guard(
        "no token fills the queue of a lane",
        "gateway/lanes/lane.py",
        "if request.size_bytes > room.room(request.token):",
        "if request.size_bytes > room.free:",
        "tests/unit/lanes/test_lane_alone.py",
    ),
    Guard(
        "a partition that takes nothing is refused before it is drafted",
        "gateway/lanes/transaction.py",
        "why = self.refused(source.topic, partition)",
        "why = None",
        "tests/unit/topics/test_partition_health.py",
    ),
    Guard(
        "what does not need the bad partition is queued again",
        "gateway/lanes/group_commit.py",
        "        if failure.unavailable:\n            failed =",
        "        if False:\n            failed =",
        "tests/unit/topics/test_partition_health.py",
    ),
    Guard(
        "a duplicate is confirmed by the group",
        "gateway/lanes/lane.py",
        "        topic, waiting = pending.request.topic, self._waiting\n"
        "        problem = await self._judged_as_owner(self.table)\n",
        "        topic, waiting = pending.request.topic, self._waiting\n        problem = None\n",
        "tests/unit/lanes/test_lane_alone.py",
    ),
    Guard(
        "only an older transaction is completed",
        "gateway/kafka/hanging_transactions.py",
        "            if open_.epoch > producer.epoch:\n",
        "            if False:\n",
        "tests/unit/kafka/test_complete_hanging.py",
    ),
    Guard(
        "open transactions are looked for at the newest leader that two brokers know",
        "gateway/kafka/hanging_transactions.py",
        "sorted((p.leader_epoch, topic.name, p.partition, p.leader) for",
        "list((p.leader_epoch, topic.name, p.partition, p.leader) for",
        "tests/unit/kafka/test_complete_hanging.py",
    ),
    Guard(
        "a newer producer id of the lane is another owner's",
        "gateway/kafka/hanging_transactions.py",
        "ids.index(open_.producer_id) > ids.index(present)",
        "False",
        "tests/unit/kafka/test_complete_hanging.py",
    ),
    Guard(
        "a session is authority over its source",
        "gateway/lanes/dedup.py",
        "    return state.session != 0 and state.token is not None and state.token != token\n",
        "    return False\n",
        "tests/unit/lanes/test_authority.py",
    ),
    Guard(
        "a living session is not taken over",
        "gateway/lanes/dedup.py",
        "    if is_admin or left_ms <= 0 or not _is_foreign(state, token):\n",
        "    if True:\n",
        "tests/unit/lanes/test_authority.py",
    ),
    Guard(
        "while a session writes, its number is needed",
        "gateway/lanes/dedup.py",
        "        if excluded is not None:\n",
        "        if False:\n",
        "tests/unit/lanes/test_authority.py",
    ),
    Guard(
        "a session that was silent ends by a chunk without its number",
        "gateway/lanes/dedup.py",
        "    elif fresh and state.is_used:\n",
        "    elif False:\n",
        "tests/unit/lanes/test_authority.py",
    ),
    Guard(
        "outside of a session a jump needs prev",
        "gateway/lanes/dedup.py",
        "    if jump <= MAX_UNCHAINED_JUMP:\n",
        "    if True:\n",
        "tests/unit/lanes/test_authority.py",
    ),
    Guard(
        "while the clocks differ no source is forgotten",
        "gateway/service/worker.py",
        "            if clock.stop is None:\n",
        "            if True:\n",
        "tests/unit/gateway/test_broker_clock.py",
    ),
    Guard(
        "a tenth of the sources is forgotten at once",
        "gateway/lanes/lane.py",
        "deque(islice(found, at_once))",
        "deque(found)",
        "tests/unit/lanes/test_lane_draft.py",
    ),
    Guard(
        "a state with an unknown flag is not guessed",
        "gateway/contract/source_state.py",
        "raw[1] > _HAS_ALL or ",
        "",
        "tests/unit/lanes",
    ),
    Guard(
        "one token leaves room for the sources of others",
        "gateway/lanes/transaction.py",
        "self._new_sources + weight(key) <= shares.room(token):",
        "shares.used < shares.limit:",
        "tests/unit/lanes/test_transaction.py",
    ),
    Guard(
        "a source that is appended to takes no seqnos",
        "gateway/lanes/dedup.py",
        "refusal = _refuse_appended(state) if state.appended_by else refuse_write(state, session, token)",
        "refusal = refuse_write(state, session, token)",
        "tests/unit/lanes/test_appends.py",
    ),
    Guard(
        "a session is not bypassed by an append",
        "gateway/lanes/dedup.py",
        "    if not state.appended_by and (state.recorded is not None or state.session):\n",
        "    if False:\n",
        "tests/unit/lanes/test_appends.py",
    ),
    Guard(
        "a key with another content is refused",
        "gateway/lanes/transaction.py",
        "        if known.digest != request.digest:\n",
        "        if False:\n",
        "tests/unit/lanes/test_appends.py",
    ),
    Guard(
        "one token leaves room for the receipts of others",
        "gateway/lanes/transaction.py",
        "        if self._new_receipts + weight(key) > shares.room(request.token):\n",
        "        if False:\n",
        "tests/unit/lanes/test_appends.py",
    ),
    Guard(
        "an append is not known by its seqno after a lost answer",
        "gateway/lanes/resolution.py",
        "    if outcome.written and state.appended_by == outcome.state.appended_by:\n",
        "    if outcome.written and state.recorded == outcome.state.recorded:\n",
        "tests/unit/lanes/test_appends.py",
    ),
    Guard(
        "an append without a key is not repeated while its outcome is unknown",
        "gateway/receivers/append.py",
        "                if part.key is None:\n",
        "                if False:\n",
        "tests/unit/receivers/test_append.py",
    ),
    Guard(
        "a browser's password is no token of other routes",
        "gateway/http/auth.py",
        "    if scheme not in schemes:\n",
        "    if scheme not in _SCHEMES:\n",
        "tests/unit/receivers/test_lines.py",
    ),
    Guard(
        "a small OTLP request does not become a large one",
        "gateway/receivers/otlp.py",
        "            if self._bytes > _LINES_BYTES:\n",
        "            if False:\n",
        "tests/unit/receivers/test_otlp.py",
    ),
    Guard(
        "a weak topic is refused",
        "gateway/topics/health.py",
        "    if not refused:\n        return None\n",
        "    return None\n",
        "tests/unit/service tests/unit/topics",
    ),
    Guard(
        "the members of a gzip body are counted",
        "gateway/http/request.py",
        "        if members > _GZIP_MEMBERS:\n",
        "        if False:\n",
        "tests/unit/http/test_request.py",
    ),
    Guard(
        "a small batch is copied out of the answer that it came in",
        "mirror/copy/batch_rewrite.py",
        "    return body if 2 * len(body) >= memoryview(batch.obj).nbytes else memoryview(bytes(body))\n",
        "    return body\n",
        "tests/unit/mirror",
    ),
    Guard(
        "a resume waits for the batches before it",
        "mirror/lanes/lane.py",
        "if not resume.partition.waiting}",
        "}",
        "tests/unit/mirror/lanes/test_mirror_lane.py",
    ),
    Guard(
        "sources that fall silent together hold a segment",
        "loaders/planning/source_facts.py",
        "if stopped > rest or is_many:",
        "if False:",
        "tests/model/test_segments_model.py tests/unit/loaders",
    ),
    Guard(
        "a rack that falls silent holds a segment",
        "loaders/planning/source_facts.py",
        "        if stopped > rest or is_many:",
        "        if stopped > rest:",
        "tests/model/test_segments_model.py",
    ),
    Guard(
        "a rack holds a segment for the longest wait alone",
        "loaders/planning/source_facts.py",
        " and now - times[stop - 1] < hold",
        "",
        "tests/model/test_segments_model.py",
    ),
    Guard(
        "all that fall silent in a table of usual rows hold a segment",
        "loaders/planning/source_facts.py",
        "idle) - most - many if is_steady else set()",
        "idle) - most - many if False else set()",
        "tests/model/test_segments_model.py",
    ),
    Guard(
        "each segment of an outage waits the longest wait",
        "loaders/planning/source_facts.py",
        "mark = newest(mark, now - hold)",
        "mark = now",
        "tests/model/test_segments_model.py",
    ),
    Guard(
        "a table with an empty segment usually has rows",
        "loaders/planning/segment_states.py",
        "_STEADY: Final = 0.75",
        "_STEADY: Final = 1.0",
        "tests/model/test_segments_model.py",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    copy = tmp_path_factory.mktemp("copy")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "docs"))
        else:
            shutil.copy(source, copy)
    (copy / "path").mkdir()
    (copy / "path" / "logferry").symlink_to(copy)
    yield copy
    shutil.rmtree(copy)


def ran(copy: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """The tests, of the copy and against it."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *tests.split()]
    path = f"{copy / 'path'}{os.pathsep}{copy}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_removed_guard_is_noticed(copy: Path, guard: Guard) -> None:
    module = copy / guard.module
    whole = module.read_text(encoding="utf-8")
    assert whole.count(guard.text) == 1, f"{guard.module} no longer holds the guard"
    module.write_text(whole.replace(guard.text, guard.without), encoding="utf-8")
    try:
        without = ran(copy, guard.tests)
    finally:
        module.write_text(whole, encoding="utf-8")
    assert without.returncode == _FAILED, without.stdout[-2000:] + without.stderr[-2000:]
    assert " failed" in without.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_copy_is_what_is_tested(copy: Path) -> None:
    """With all guards in place the same tests pass, so each failure is that of the guard."""
    tests = dict.fromkeys(name for guard in GUARDS for name in guard.tests.split())
    whole = ran(copy, " ".join(tests))
    assert whole.returncode == 0, whole.stdout[-2000:] + whole.stderr[-2000:]
    program = "import logferry.gateway as g; print(g.__file__)"
    path = {**os.environ, "PYTHONPATH": str(copy / "path")}
    found = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True, check=True)
    assert str(copy / "path") in found.stdout
