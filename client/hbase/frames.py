"""HBase's RPC as a server and a client speak it: preamble, connection header, calls and answers. Pure.

A connection begins with ``HBas``, a version and a kind of authentication, and a connection header. Then each side
sends frames: a length of four bytes, and so many bytes, in which messages have lengths of their own in front. The
cells of a call follow its messages.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from logferry.client.hbase import messages
from logferry.client.hbase.cells import CODECS
from logferry.client.hbase.messages import ForeignBytes, delimited, split_delimited

MAGIC, VERSION, SIMPLE = b"HBas", 0, 80
PREAMBLE_BYTES = len(MAGIC) + 2
PREAMBLE = MAGIC + bytes([VERSION, SIMPLE])
LENGTH = struct.Struct(">i")
# A connection header is small; one that is not is another protocol.
MOST_HEADER_BYTES = 64 << 10
# Of a call that is too large, so much is read as its header.
MOST_CALL_HEADER_BYTES = 4 << 10
_AUTHENTICATIONS = {81: "Kerberos", 82: "delegation tokens"}
_ERROR = "java.io.IOException"


class RemoteCall(NamedTuple):
    """``timeout_ms``: after so long HBase gives the call up and sends it again; 0: it does not say. ``came``: when its
    first bytes came, monotonic.
    """

    call_id: int
    method: str
    timeout_ms: int
    param: memoryview
    cells: memoryview
    came: float


def check_preamble(data: bytes) -> None:
    """Raises ForeignBytes for another protocol, version or authentication."""
    if data[:4] != MAGIC:
        raise ForeignBytes(f"not HBase's protocol: the connection begins with {data[:4]!r}")
    if data[4] != VERSION:
        raise ForeignBytes(f"version {data[4]} of HBase's protocol is not known, only version {VERSION}")
    if data[5] != SIMPLE:
        kind = _AUTHENTICATIONS.get(data[5], f"the authentication {data[5]}")
        raise ForeignBytes(f"HBase wants {kind}; only simple authentication (80) is supported")


def refusal_of(header: bytes) -> str | None:
    """Why no call of a connection with this header can be carried out; None: it can. Raises ForeignBytes."""
    found = messages.parse("ConnectionHeader", header)
    if found.service_name != "AdminService":
        return f"the service {found.service_name!r} is not served here, only AdminService: this is a replication peer"
    if found.rpc_crypto_cipher_transformation:
        return "encryption by hbase.rpc.crypto.encryption.aes.enabled is not supported"
    if found.cell_block_compressor_class:
        return (
            f"cells compressed by {found.cell_block_compressor_class} are not supported: remove "
            "hbase.client.rpc.compressor from the configuration of the region servers"
        )
    if found.cell_block_codec_class not in CODECS:
        return (
            f"cells encoded by {found.cell_block_codec_class or 'no codec'} are not supported: remove "
            f"hbase.replication.rpc.codec from the configuration of the region servers, or set {CODECS[0]}"
        )
    return None


def call_of(frame: memoryview, came: float = 0.0) -> RemoteCall:
    """The call in a frame. Raises ForeignBytes."""
    head, at = split_delimited(frame, 0, "request header")
    header = messages.parse("RequestHeader", head)
    if not header.HasField("call_id") or not header.method_name:
        raise ForeignBytes("the request header names no call or no method")
    param = frame[at:at]
    if header.request_param:
        param, at = split_delimited(frame, at, "request")
    size = header.cell_block_meta.length
    if size != len(frame) - at:
        raise ForeignBytes(f"the cell block should have {size} bytes and has {len(frame) - at}")
    return RemoteCall(header.call_id, header.method_name, header.timeout, param, frame[at:], came)


def call_id_of(start: memoryview) -> int | None:
    """The id of the call whose frame begins so; None: it cannot be read."""
    try:
        head, _ = split_delimited(start, 0, "request header")
        header = messages.parse("RequestHeader", head)
    except ForeignBytes:
        return None
    return int(header.call_id) if header.HasField("call_id") else None


def answer(call_id: int, message: Any = None) -> bytes:
    """The frame that says that the call is done; without ``message``: with an empty one."""
    body = delimited(messages.new("ResponseHeader", call_id=call_id))
    return _framed(body + (b"\x00" if message is None else delimited(message)))


def failure(call_id: int, why: str, host: str = "", port: int = 0) -> bytes:
    """The frame that makes HBase log ``why`` and send the same again."""
    problem = messages.new(
        "ExceptionResponse",
        exception_class_name=_ERROR,
        stack_trace=f"{_ERROR}: logferry: {why}",
        hostname=host,
        port=port,
        do_not_retry=False,
    )
    return _framed(delimited(messages.new("ResponseHeader", call_id=call_id, exception=problem)))


# ---- the side of a client -------------------------------------------------------------------------------------------


def opening(service: str, user: str, codec: str = "") -> bytes:
    """What a client sends first."""
    header = messages.new("ConnectionHeader", service_name=service, user_info={"effective_user": user})
    if codec:
        header.cell_block_codec_class = codec
    return PREAMBLE + _framed(header.SerializeToString())


def request(call_id: int, method: str, message: Any, cells: bytes = b"", timeout_ms: int = 0) -> bytes:
    """The frame of a call."""
    header = messages.new("RequestHeader", call_id=call_id, method_name=method, request_param=True)
    if timeout_ms:
        header.timeout = timeout_ms
    if cells:
        header.cell_block_meta.length = len(cells)
    return _framed(delimited(header) + delimited(message) + cells)


class CallFailed(Exception):
    """The server answered with an exception. ``kind``: the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def reply_of(frame: memoryview, name: str) -> Any:
    """The message of this name in an answer. Raises CallFailed, ForeignBytes."""
    head, at = split_delimited(frame, 0, "response header")
    header = messages.parse("ResponseHeader", head)
    if header.HasField("exception"):
        kind, trace = header.exception.exception_class_name, header.exception.stack_trace
        first = trace.splitlines()[0] if trace else kind
        raise CallFailed(kind, first.removeprefix(f"{kind}: "))
    body, _ = split_delimited(frame, at, "response")
    return messages.parse(name, body)


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body
