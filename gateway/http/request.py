"""From the bytes of a request to chunks: encodings undone, MessagePack taken apart, everything checked. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import cramjam
import msgpack
from logferry.gateway.contract.chunk import MAX_SEQNO, Chunk, Malformed, check_attributes
from logferry.gateway.errors import Problem
from pydantic import BaseModel, ValidationError

_BROKEN_ESCAPE: Final = re.compile(r"%(?![0-9a-fA-F]{2})")
_FIELDS: Final = 5
_SHAPE: Final = "an array [seqno, prev, created_ms, attributes, data]"
_NUMBER: Final = re.compile(r"[0-9]{1,19}\Z", re.ASCII)
_Model = TypeVar("_Model", bound=BaseModel)


def number(text: str, what: str, limit: int = MAX_SEQNO) -> int:
    """A whole number from 0 to the limit, in plain decimal digits. Raises Malformed."""
    if not _NUMBER.match(text) or int(text) > limit:
        raise Malformed(f"{what}: {text[:40]!r} is not a whole number from 0 to {limit}")
    return int(text)


def optional_number(query: Mapping[str, str], name: str) -> int | None:
    """The number of that name, if it is given. Raises Malformed."""
    return number(query[name], name) if name in query else None


def validated(model: type[_Model], body: bytes) -> _Model:
    """The body as the model. Raises Malformed with each wrong place."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        texts = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise Malformed("; ".join(texts)) from None


def percent_decoded(text: str, what: str) -> str:
    """Percent-encoded UTF-8. Raises Malformed where the bytes are not UTF-8 or an escape is broken."""
    if "%" not in text and text.isascii():
        return text
    if _BROKEN_ESCAPE.search(text):
        raise Malformed(f"{what}: a % is not followed by two hexadecimal digits")
    try:
        return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise Malformed(f"{what}: not UTF-8") from None


def decoded_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Undoes Content-Encoding; what comes out is bounded. Raises Problem."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding in ("gzip", "x-gzip"):
        return _gunzip(body, limit)
    if encoding == "zstd":
        return _unzstd(body, limit)
    raise Problem("unsupported-media-type", f"Content-Encoding: {encoding[:40]!r} is not gzip, zstd or identity")


def _gunzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit
    rest = body
    while rest or not parts:
        inflate = zlib.decompressobj(wbits=31)
        try:
            part = inflate.decompress(rest, room + 1)
        except zlib.error as error:
            raise Problem("bad-request", f"body: not gzip: {error}") from None
        room -= len(part)
        if room < 0:
            raise Problem("too-large", f"the body is over {limit} bytes when unpacked", limit_bytes=limit)
        if not inflate.eof:
            raise Problem("bad-request", "body: the gzip stream is cut off")
        parts.append(part)
        rest = inflate.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    out = bytearray(limit + 1)
    try:
        size = cramjam.zstd.decompress_into(body, out)
    except cramjam.DecompressionError as error:
        if "write whole buffer" not in str(error):
            raise Problem("bad-request", f"body: not zstd: {error}") from None
        size = limit + 1
    if size > limit:
        raise Problem("too-large", f"the body is over {limit} bytes when unpacked", limit_bytes=limit)
    return bytes(memoryview(out)[:size])


class ChunkLimits(NamedTuple):
    """``data_bytes``: of a chunk. ``record_bytes``: of its data and attributes. ``chunks``: in one request."""

    data_bytes: int
    record_bytes: int
    chunks: int


def unpack_chunks(body: bytes, limits: ChunkLimits) -> list[Chunk]:
    """A stream of MessagePack arrays [seqno, prev, created_ms, attributes, data]. Raises Malformed or Problem.

    Each array is checked as soon as it is complete and each head before what it announces: arrays in arrays, which
    take fifty times the memory of their bytes, end at the first.
    """
    chunks: list[Chunk] = []
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(body) or 1,
        max_bin_len=len(body),
        max_str_len=1 << 16,
        max_array_len=_FIELDS,
        max_map_len=1 << 10,
        list_hook=lambda item: _chunk(item, f"chunk {len(chunks)}", limits),
        object_hook=lambda item: _flat(item, f"chunk {len(chunks)}"),
    )
    unpacker.feed(body)
    consumed = 0
    try:
        for item in unpacker:
            if not isinstance(item, Chunk):
                raise Malformed(f"body: chunk {len(chunks)} is not {_SHAPE}")
            chunks.append(item)
            if len(chunks) > limits.chunks:
                detail = f"the body has more than {limits.chunks} chunks"
                raise Problem("too-large", detail, limit_chunks=limits.chunks)
            consumed = unpacker.tell()
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"body: chunk {len(chunks)} is not MessagePack, or not {_SHAPE}: {error}") from None
    if consumed != len(body):
        raise Malformed(f"body: chunk {len(chunks)} is cut off after {len(body) - consumed} bytes")
    if not chunks:
        raise Malformed("body: holds no chunk")
    return chunks


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
