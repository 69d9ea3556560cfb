"""Decodes requests: Content-Encoding, MessagePack, headers and query into checked values and chunks. Pure."""

from __future__ import annotations

import binascii
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import cramjam
import msgpack
from logferry.gateway.contract.chunk import TRACEPARENT, Chunk
from logferry.gateway.contract.names import (
    MAX_ATTRIBUTE_VALUE_BYTES,
    MAX_ATTRIBUTES,
    MAX_SEQNO,
    Malformed,
    check_attributes,
)
from logferry.gateway.errors import Problem
from multidict import MultiMapping
from pydantic import BaseModel, ValidationError

_FIELDS: Final = 5
_KEYS_OF_AN_OBJECT: Final = 32
_ERRORS_SHOWN: Final = 10
# Parallel compressors write a member for every 64 KiB or more.
_GZIP_MEMBERS: Final = 1024
# pzstd and its like write a frame for every MiB or so; beside data frames there are those that are skipped.
_ZSTD_FRAMES: Final = 1024
_ZSTD_MAGICS: Final = (b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18")
_PIECE_BYTES: Final = 1 << 16
# The values, keys and brackets of ten thousand positions; more are refused before any is looked at.
_JSON_TOKENS: Final = 100_000
_SHAPE: Final = "an array [seqno, prev, created_ms, attributes, data]"
# W3C Trace Context: a version, a trace, a span and flags; later versions may add more.
_TRACE: Final = re.compile(r"(?!ff)([0-9a-f]{2})(-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?\Z")
_NUMBER: Final = re.compile(r"[0-9]{1,19}\Z", re.ASCII)
_Model = TypeVar("_Model", bound=BaseModel)


def number(text: str, what: str, limit: int = MAX_SEQNO) -> int:
    """A whole number from 0 to the limit, in plain decimal digits. Raises Malformed."""
    if not _NUMBER.match(text) or (found := int(text)) > limit:
        raise Malformed(f"{what}: {text[:40]!r} is not a whole number from 0 to {limit}")
    return found


def optional_number(query: Mapping[str, str], name: str) -> int | None:
    """The number of that name, if it is given. Raises Malformed."""
    return number(query[name], name) if name in query else None


def flag(query: Mapping[str, str], name: str) -> bool:
    """Whether it is given as ``true``; ``false`` and nothing mean no. Raises Malformed."""
    given = query.get(name, "false")
    if given not in ("true", "false"):
        raise Malformed(f"{name}: {given[:40]!r} is neither true nor false")
    return given == "true"


def validated(model: type[_Model], body: bytes) -> _Model:
    """The JSON body as the model. Raises Malformed with each wrong place, and a bounded work for any body."""
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > _JSON_TOKENS:
        raise Malformed(f"body: more than {_JSON_TOKENS} values and keys")
    try:
        json.loads(body, object_pairs_hook=_few_keys)
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[:_ERRORS_SHOWN]
        texts = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in found)
        raise Malformed("; ".join(texts)) from None
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"body: not JSON: {error}") from None


def _few_keys(pairs: list[tuple[str, Any]]) -> None:
    """Each unknown key costs the model a hundred times the work of a known one."""
    if len(pairs) > _KEYS_OF_AN_OBJECT:
        raise Malformed(f"body: an object has {len(pairs)} keys; at most {_KEYS_OF_AN_OBJECT} are known")


def percent_decoded(text: str, what: str) -> str:
    """Percent-encoded UTF-8. Raises Malformed where the bytes are not UTF-8 or an escape is broken.

    By the decoder of quoted-printable text, which is C and has the same escapes after another sign: a head may hold
    700,000 of them. Each one shortens the text by two; where it was shortened by less, one was broken.
    """
    if "%" not in text and text.isascii():
        return text
    raw = text.encode("utf-8", "surrogateescape")
    quoted = raw.replace(b"=", b"=3D").replace(b"%", b"=")
    decoded = binascii.a2b_qp(quoted)
    if len(decoded) != len(raw) - 2 * raw.count(b"%") or b"\n" in raw or b"\r" in raw:
        raise Malformed(f"{what}: a % is not followed by two hexadecimal digits")
    try:
        return decoded.decode()
    except UnicodeDecodeError:
        raise Malformed(f"{what}: not UTF-8") from None


def decoded_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Undoes Content-Encoding, up to ``limit`` bytes. Raises Problem."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding in ("gzip", "x-gzip"):
        return _gunzip(body, limit)
    if encoding == "zstd":
        return _unzstd(body, limit)
    raise Problem("unsupported-media-type", f"Content-Encoding: {encoding[:40]!r} is not gzip, zstd or identity")


def _gunzip(body: bytes, limit: int) -> bytes:
    """Fed in pieces: what follows a member is copied by zlib, once for each member."""
    parts: list[bytes] = []
    room, at, members = limit, 0, 0
    view = memoryview(body)
    while at < len(body) or not members:
        members += 1
        if members > _GZIP_MEMBERS:
            raise Problem("bad-request", f"body: more than {_GZIP_MEMBERS} gzip members")
        inflate = zlib.decompressobj(wbits=31)
        while not inflate.eof:
            piece = inflate.unconsumed_tail or view[at : at + _PIECE_BYTES]
            if not piece:
                raise Problem("bad-request", "body: the gzip stream is cut off")
            at += 0 if inflate.unconsumed_tail else len(piece)
            try:
                part = inflate.decompress(piece, room + 1)
            except zlib.error as error:
                raise Problem("bad-request", f"body: not gzip: {error}") from None
            room -= len(part)
            if room < 0:
                raise _too_large(limit)
            parts.append(part)
        at -= len(inflate.unused_data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    """Into a buffer that grows: most bodies are far smaller than the limit."""
    for magic in _ZSTD_MAGICS:
        at = frames = 0
        while (at := body.find(magic, at)) >= 0:
            at, frames = at + len(magic), frames + 1
            if frames > _ZSTD_FRAMES:
                raise Problem("bad-request", f"body: more than {_ZSTD_FRAMES} zstd frames")
    room = min(limit + 1, 16 * len(body) + _PIECE_BYTES)
    while True:
        out = bytearray(room)
        try:
            size = cramjam.zstd.decompress_into(body, out)
            break
        except cramjam.DecompressionError as error:
            if "write whole buffer" not in str(error):
                raise Problem("bad-request", f"body: not zstd: {error}") from None
        if room > limit:
            raise _too_large(limit)
        room = min(limit + 1, 8 * room)
    if size > limit:
        raise _too_large(limit)
    return bytes(memoryview(out)[:size])


def _too_large(limit: int) -> Problem:
    return Problem("too-large", f"the body is over {limit} bytes when unpacked", limit_bytes=limit)


class ChunkLimits(NamedTuple):
    """``data_bytes``: of a chunk. ``record_bytes``: of its data and attributes. ``chunks``: in one request."""

    data_bytes: int
    record_bytes: int
    chunks: int


def iter_chunks(body: bytes, limits: ChunkLimits) -> Iterator[Chunk]:
    """A stream of MessagePack arrays [seqno, prev, created_ms, attributes, data]. Raises Malformed or Problem.

    Each array is checked as soon as it is complete, and each head before its content: nested arrays, which take fifty
    times the memory of their bytes, end at the first.
    """
    count = 0
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(body) or 1,
        max_bin_len=len(body),
        # Some more than are allowed, for an answer that names the limit.
        max_str_len=2 * MAX_ATTRIBUTE_VALUE_BYTES,
        max_array_len=_FIELDS,
        max_map_len=2 * MAX_ATTRIBUTES,
        list_hook=lambda item: _chunk(item, f"chunk {count}", limits),
        object_hook=lambda item: _flat(item, f"chunk {count}"),
    )
    unpacker.feed(body)
    consumed = 0
    try:
        for item in unpacker:
            if not isinstance(item, Chunk):
                raise Malformed(f"body: chunk {count} is not {_SHAPE}")
            count += 1
            if count > limits.chunks:
                detail = f"the body has more than {limits.chunks} chunks"
                raise Problem("too-large", detail, limit_chunks=limits.chunks)
            consumed = unpacker.tell()
            yield item
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"body: chunk {count} is not MessagePack, or not {_SHAPE}: {error}") from None
    if consumed != len(body):
        raise Malformed(f"body: chunk {count} is cut off after {len(body) - consumed} bytes")
    if not count:
        raise Malformed("body: holds no chunk")


def _chunk(item: list[Any], where: str, limits: ChunkLimits) -> Chunk:
    if len(item) != _FIELDS:
        raise Malformed(f"body: {where} is not {_SHAPE}")
    seqno, prev, created_ms, attributes, data = item
    _integer(seqno, f"{where}: seqno")
    if prev is not None:
        _integer(prev, f"{where}: prev")
    if created_ms is not None:
        _integer(created_ms, f"{where}: created_ms")
    if attributes is not None and not isinstance(attributes, dict):
        raise Malformed(f"body: {where}: attributes is not a map")
    if not isinstance(data, bytes):
        raise Malformed(f"body: {where}: data is not bin")
    return checked(Chunk(seqno, prev, created_ms, attributes or {}, data), where, limits)


def _flat(item: dict[Any, Any], where: str) -> dict[Any, Any]:
    if any(isinstance(value, dict) for value in item.values()):
        raise Malformed(f"body: {where}: attributes holds a map")
    return item


def _integer(value: Any, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SEQNO:
        raise Malformed(f"body: {what} is not a whole number from 0 to {MAX_SEQNO}")


def checked(chunk: Chunk, where: str, limits: ChunkLimits) -> Chunk:
    """The chunk, if its parts fit together and it will fit into a record. Raises Malformed or Problem."""
    if chunk.prev is not None and chunk.prev >= chunk.seqno:
        raise Malformed(f"{where}: prev {chunk.prev} is not below seqno {chunk.seqno}")
    size, limit = len(chunk.data), limits.data_bytes
    if chunk.attributes:
        check_attributes(chunk.attributes)
        attributes = sum(len(name) + len(value.encode()) for name, value in chunk.attributes.items())
        if size + attributes > limits.record_bytes:
            size, limit = size + attributes, limits.record_bytes
    if size > limit:
        raise Problem("too-large", f"{where}: {size} bytes, a chunk may have {limit}", limit_bytes=limit)
    return chunk


def trace_of(headers: MultiMapping[str]) -> str | None:
    """The ``traceparent`` of a request by `valid_trace`; None: it has none, several, or one that is not valid."""
    found = headers.get(TRACEPARENT)
    return None if found is None or len(headers.getall(TRACEPARENT)) > 1 else valid_trace(found)


def valid_trace(text: str) -> str | None:
    """A traceparent as one of version 00, whose fields a later version has first; None: it is not valid."""
    match = _TRACE.match(text)
    return None if match is None or (match[1] == "00" and match[3] is not None) else f"00{match[2]}"


def traced(chunk: Chunk, trace: str | None) -> Chunk:
    """The chunk with the trace of its request, where it has none of its own and room for it."""
    if trace is None or TRACEPARENT in chunk.attributes or len(chunk.attributes) >= MAX_ATTRIBUTES:
        return chunk
    return chunk._replace(attributes={**chunk.attributes, TRACEPARENT: trace})


def header_attributes(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Attributes from ``X-Attr-<name>: value`` headers; values are percent-encoded UTF-8."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name[:7].lower() == "x-attr-":
            attribute = name[7:].lower()
            if attribute in found:
                raise Malformed(f"header {name}: is given more than once")
            found[attribute] = percent_decoded(value, f"header {name}")
    return found
