"""Entries of container runtimes → messages: one by one, and whatever the cuts are."""

from __future__ import annotations

import random

import pytest
from logferry.client.files.chunking import FileBatch, Limits, cut
from logferry.client.files.containers import (
    FORMS,
    ContainerRules,
    container_attributes,
    container_rules,
    cri_entry,
    docker_entry,
)
from logferry.client.files.lines import LineRules, compiled

from tests.support.container_log import ContainerLog, cri, docker, lines_of

T = b"2026-11-22T10:00:00.1Z"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (T + b" stdout F text", (T, b"stdout", False, b"text")),
        (T + b" stderr P  two  blanks ", (T, b"stderr", True, b" two  blanks ")),
        (T + b" stdout F ", (T, b"stdout", False, b"")),
        (T + b" stdout P:more:tags x", (T, b"stdout", True, b"x")),
        (T + b" stdout F a\rb\xff\0", (T, b"stdout", False, b"a\rb\xff\0")),
        (b"2026-11-22T10:00:00.123456789+01:00 stdout F x", None),
        (T + b" stdout F", None),
        (T + b" stdin F x", None),
        (T + b" stdout X x", None),
        (b"no entry", None),
        (b"", None),
        (b"\0" * 100, None),
    ],
)
def test_an_entry_of_cri(line: bytes, expected: tuple[object, ...] | None) -> None:
    if line.startswith(b"2026-11-22T10:00:00.123456789"):
        expected = (b"2026-11-22T10:00:00.123456789+01:00", b"stdout", False, b"x")
    assert cri_entry(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"log":"a \\u003c \\"b\\"\\n","stream":"stdout","time":"t"}', (b"t", b"stdout", False, b'a < "b"')),
        (b'{"log":"part","stream":"stderr","time":"t"}', (b"t", b"stderr", True, b"part")),
        (b'{"log":"x\\n","stream":"stdout","attrs":{"a":"b"},"time":"t"}', (b"t", b"stdout", False, b"x")),
        (b'{"log":"\\n","stream":"stdout","time":"t"}', (b"t", b"stdout", False, b"")),
        (b'{"log":"back\\\\n","stream":"stdout","time":"t"}', (b"t", b"stdout", True, b"back\\n")),
        (b'{"log":"two\\nlines\\n","stream":"stdout","time":"t"}', None),
        (b'{"log":"\\ud800\\n","stream":"stdout","time":"t"}', None),
        (b'{"log":"x\\n","stream":"stdin","time":"t"}', None),
        (b'{"log":"x\\n","stream":["stdout"],"time":"t"}', None),
        (b'{"log":"x\\n","stream":"stdout","time":""}', None),
        (b'{"log":"x\\n","stream":"stdout"}', None),
        (b'{"log":7,"stream":"stdout","time":"t"}', None),
        (b'{"log":"\xff\\n","stream":"stdout","time":"t"}', None),
        (b'{"log":"cut off', None),
        (b"[" * 100_000, None),
        (b"7", None),
        (b"", None),
    ],
)
def test_an_entry_of_docker(line: bytes, expected: tuple[object, ...] | None) -> None:
    assert docker_entry(line) == expected


def chunks(
    data: bytes, rules: ContainerRules, limits: Limits, flush: bool
) -> tuple[list[tuple[bytes, dict[str, str]]], int]:
    """What is sent of each chunk, with its attributes; and how much of the data has to wait."""
    pieces = tuple(cut(data, False, limits, flush))
    end = pieces[-1].end if pieces else 0
    batch = FileBatch(0, data[:end], pieces, 0, {}, rules)
    return [(b"".join(parts), chunk.attributes) for chunk, parts in batch.chunks()], len(data) - end


SMALL = Limits(4096, 1 << 20, 1 << 21)


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_joined_in_each_stream(form: str) -> None:
    write = {"cri": cri, "docker": docker}[form]
    data = b"".join(
        (
            write(1, "stdout", b"one ", True), write(2, "stderr", b"other", False), write(3, "stdout", b"line", True),
            write(4, "stderr", b"half", True), write(5, "stdout", b"", False), write(6, "stderr", b"s", False),
        )
    )  # fmt: skip
    rules = container_rules(form, "time stream", None)
    ((sent, told),), waits = chunks(data, rules, SMALL._replace(rules=rules), False)
    assert (lines_of(sent), told, waits) == (
        {"stderr": [(2, b"other"), (4, b"halfs")], "stdout": [(1, b"one line")], "": []}, {}, 0
    )  # fmt: skip
    bare = container_rules(form, "", None)
    assert bare.sent(data, True) == (b"other\none line\nhalfs\n", {})
    assert container_rules(form, "stream", None).sent(data, True)[0] == b"stderr other\nstdout one line\nstderr halfs\n"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_open_waits_and_is_marked_if_it_has_to_be_sent(form: str) -> None:
    write = {"cri": cri, "docker": docker}[form]
    whole, part = write(1, "stdout", b"whole", False), write(2, "stderr", b"par", True)
    rules = container_rules(form, "", None)
    limits = SMALL._replace(rules=rules)
    assert chunks(whole + part, rules, limits, False) == ([(b"whole\n", {})], len(part))
    assert chunks(whole + part, rules, limits, True) == ([(b"whole\n", {}), (b"par\n", {"unfinished": "stderr"})], 0)
    both = part + write(3, "stdout", b"x", True)
    assert chunks(both, rules, limits, True)[0] == [(b"par\nx\n", {"unfinished": "stderr stdout"})]


def test_a_message_that_is_too_long_is_parted_and_marked() -> None:
    rules = container_rules("cri", "", None)
    limits = Limits(1024, 4096, 8192, rules=rules)
    parts = [cri(number, "stdout", b"%03d" % number * 100, number < 29) for number in range(30)]
    found, waits = chunks(b"".join(parts), rules, limits, False)
    assert waits == 0
    assert [told for _, told in found] == [{"unfinished": "stdout"}] * (len(found) - 1) + [{}]
    assert b"".join(sent for sent, _ in found).replace(b"\n", b"") == b"".join(b"%03d" % n * 100 for n in range(30))
    assert len(found) > 2


def test_an_entry_that_is_too_long_is_sent_as_it_is() -> None:
    rules = container_rules("cri", "", None)
    limits = Limits(1024, 4096, 8192, rules=rules)
    data = cri(1, "stdout", b"x" * 9000, False) + cri(2, "stdout", b"next", False)
    pieces = cut(data, False, limits, False)
    assert [piece.split for piece in pieces] == ["first", "middle", "last", None]
    sent = [b"".join(parts) for _, parts in FileBatch(0, data, tuple(pieces), 0, {}, rules).chunks()]
    assert b"".join(sent) == data[: pieces[-1].begin] + b"next\n"


def test_malformed_entries_are_kept_and_counted() -> None:
    rules = container_rules("cri", "", LineRules(compiled(["wanted"])))
    data = (
        cri(1, "stdout", b"wan", True)
        + b"garbage\n\n"
        + cri(2, "stdout", b"ted", False)
        + cri(3, "stdout", b"x", False)
    )
    assert rules.sent(data, True) == (b"garbage\n\nwanted\n", {"filtered": "1", "malformed": "2"})


def test_the_rules_see_the_message() -> None:
    """Neither its time nor its stream, and in UTF-8."""
    rules = container_rules("cri", "time stream", LineRules((), compiled(["stdout", "^2026"]), "latin-1"))
    data = cri(1, "stdout", b"caf\xe9", False) + cri(2, "stderr", b"of stdout", False)
    assert rules.sent(data, True) == (b"2026-11-22T10:00:00.000000001Z stdout caf\xc3\xa9\n", {"filtered": "1"})


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("form", FORMS)
def test_the_messages_are_those_of_the_container_wherever_it_is_cut(form: str, seed: int) -> None:
    """Cut again and again as the file grows, also where an open message is waited for no longer."""
    rng = random.Random(seed)
    log, rules = ContainerLog(form, rng), container_rules(form, "time stream", None)
    limits = Limits(rng.choice((1024, 4096)), 1 << 20, 1 << 21, rules=rules)
    data, sent, flushes = b"", b"", 0
    for _ in range(60):
        data += b"".join(log.entry() for _ in range(rng.choice((1, 1, 5, 40))))
        held = data[: rng.randrange(len(data))] if rng.random() < 0.3 else data  # the reader sees a part of it
        flush = rng.random() < 0.05
        held = held[: held.rfind(b"\n") + 1] if flush else held
        found, waits = chunks(held, rules, limits, flush)
        data = data[len(held) - waits :]
        sent += b"".join(each for each, _ in found)
        flushes += sum(len(told.get("unfinished", "").split()) for _, told in found)
    log.end()
    found, waits = chunks(data, rules, limits, True)
    assert waits == 0
    sent += b"".join(each for each, _ in found)
    lines = lines_of(sent)
    assert [line for _, line in lines[""]] == log.malformed
    for stream in ("stdout", "stderr"):
        assert b"".join(message for _, message in lines[stream]) == b"".join(text for _, text in log.told[stream])
    parted = sum(len(lines[stream]) - len(log.told[stream]) for stream in ("stdout", "stderr"))
    assert 0 <= parted <= flushes
    if not flushes:
        assert {**lines, "": []} == {**log.told, "": []}


def test_whose_file_it_is() -> None:
    uid, digits = "8a1c0b7e-0a0c-4d1b-9c65-2f1d0c0f2c11", "0123456789abcdef" * 4
    assert container_attributes(f"/var/log/pods/shop_web-7d_{uid}/nginx/0.log") == {
        "namespace": "shop", "pod": "web-7d", "pod_uid": uid, "container": "nginx"
    }  # fmt: skip
    assert container_attributes(f"/var/log/pods/shop_web-7d_{uid}/nginx/0.log.20261122-101112") == {
        "namespace": "shop", "pod": "web-7d", "pod_uid": uid, "container": "nginx"
    }  # fmt: skip
    assert container_attributes(f"/var/log/containers/web-7d_shop_nginx-proxy-{digits}.log") == {
        "pod": "web-7d", "namespace": "shop", "container": "nginx-proxy", "container_id": digits
    }  # fmt: skip
    for rotated in ("", ".1"):
        path = f"/var/lib/docker/containers/{digits}/{digits}-json.log{rotated}"
        assert container_attributes(path) == {"container_id": digits}
    assert container_attributes("/srv/x.log") == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [(("crio", "", None), "crio"), (("cri", "time time", None), "twice"), (("cri", "flag", None), "flag"),
     (("docker", "", LineRules(encoding="latin-1")), "encoding")],
)  # fmt: skip
def test_what_is_refused(given: tuple[str, str, LineRules | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        container_rules(*given)
