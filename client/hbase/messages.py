"""The protobuf messages of HBase 2 that a replication peer and a reader of its log need, built at import. Pure.

A field number is that of HBase's own definition; fields that are left out here are skipped on reading. All fields are
optional, so that a foreign message is refused by the code that needs the field, with a text, and not by the parser.
An enumeration is read as a number: the same bytes.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

# Message: its fields as name=number and type; "*" marks a repeated one.
_MESSAGES = """
UserInformation: effective_user=1 string
ConnectionHeader: user_info=1 UserInformation, service_name=2 string, cell_block_codec_class=3 string, \
cell_block_compressor_class=4 string, rpc_crypto_cipher_transformation=6 string
CellBlockMeta: length=1 uint32
RequestHeader: call_id=1 uint32, method_name=3 string, request_param=4 bool, cell_block_meta=5 CellBlockMeta, \
timeout=7 uint32
ExceptionResponse: exception_class_name=1 string, stack_trace=2 string, hostname=3 string, port=4 int32, \
do_not_retry=5 bool
ResponseHeader: call_id=1 uint32, exception=2 ExceptionResponse, cell_block_meta=3 CellBlockMeta
ServerName: host_name=1 string, port=2 uint32, start_code=3 uint64
ActiveMaster: master=1 ServerName
MetaRegionServer: server=1 ServerName
ClusterId: cluster_id=1 string
UUID: least_sig_bits=1 uint64, most_sig_bits=2 uint64
WALKey: encoded_region_name=1 bytes, table_name=2 bytes, log_sequence_number=3 uint64, write_time=4 uint64, \
following_kv_count=7 uint32, cluster_ids=8* UUID
WALHeader: has_compression=1 bool, encryption_key=2 bytes, has_tag_compression=3 bool, writer_cls_name=4 bytes, \
cell_codec_cls_name=5 bytes, has_value_compression=6 bool
RegionEventDescriptor: event_type=1 int32, table_name=2 bytes, encoded_region_name=3 bytes, \
log_sequence_number=4 uint64, region_name=7 bytes
WALEntry: key=1 WALKey, key_value_bytes=2* bytes, associated_cell_count=3 int32
ReplicateWALEntryRequest: entry=1* WALEntry
RegionServerInfo: infoPort=1 int32
WalPosition: position=1 int64
BytesBytesPair: first=1 bytes, second=2 bytes
TableName: namespace=1 bytes, qualifier=2 bytes
ColumnFamilySchema: name=1 bytes, attributes=2* BytesBytesPair
TableSchema: table_name=1 TableName, column_families=3* ColumnFamilySchema
GetTableDescriptorsRequest: table_names=1* TableName
GetTableDescriptorsResponse: table_schema=1* TableSchema
TableCF: table_name=1 TableName, families=2* bytes
ReplicationPeer: clusterkey=1 string, replicationEndpointImpl=2 string, table_cfs=5* TableCF, replicate_all=8 bool, \
serial=11 bool
ReplicationState: state=1 int32
ReplicationPeerDescription: id=1 string, state=2 ReplicationState, config=3 ReplicationPeer
AddReplicationPeerRequest: peer_id=1 string, peer_config=2 ReplicationPeer, peer_state=3 ReplicationState
PeerRequest: peer_id=1 string
ListReplicationPeersRequest: regex=1 string
ListReplicationPeersResponse: peer_desc=1* ReplicationPeerDescription
ProcedureStarted: proc_id=1 uint64
ProcedureResultRequest: proc_id=1 uint64
GenericException: class_name=1 string, message=2 string
ForeignException: generic_exception=2 GenericException
ProcedureResult: state=1 int32, exception=5 ForeignException
RegionSpecifier: type=1 int32, value=2 bytes
Column: family=1 bytes, qualifier=2* bytes
Scan: column=1* Column, start_row=3 bytes, stop_row=4 bytes, max_versions=7 uint32
ScanRequest: region=1 RegionSpecifier, scan=2 Scan, scanner_id=3 uint64, number_of_rows=4 uint32
Cell: row=1 bytes, family=2 bytes, qualifier=3 bytes, value=6 bytes
Result: cell=1* Cell
ScanResponse: scanner_id=2 uint64, more_results=3 bool, results=5* Result, more_results_in_region=8 bool
"""
_TYPES = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
}


class ForeignBytes(ValueError):
    """The bytes are not those of the protocol; the text says which and where."""


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="logferry/hbase.proto", package="logferry.hbase", syntax="proto2")
    lines = dict(line.split(": ", 1) for line in _MESSAGES.strip().splitlines())
    for name, fields in lines.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            place, kind = text.split()
            field, _, number = place.partition("=")
            added = message.field.add(name=field, number=int(number.rstrip("*")))
            added.label = added.LABEL_REPEATED if number.endswith("*") else added.LABEL_OPTIONAL
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type, added.type_name = added.TYPE_MESSAGE, f".logferry.hbase.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"logferry.hbase.{name}")) for name in lines
    }


_CLASSES = _build()


def new(name: str, **fields: Any) -> Any:
    """A message of this name."""
    return _CLASSES[name](**fields)


def parse(name: str, data: bytes | memoryview) -> Any:
    """The message in the bytes. Raises ForeignBytes."""
    message = _CLASSES[name]()
    try:
        message.ParseFromString(bytes(data))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ForeignBytes(f"not a {name}: {error}") from None
    return message


# ---- lengths in front of messages -----------------------------------------------------------------------------------


def delimited(message: Any) -> bytes:
    """The message with its length in front."""
    body: bytes = message.SerializeToString()
    return _varint(len(body)) + body


def split_delimited(data: memoryview, start: int, what: str) -> tuple[memoryview, int]:
    """The bytes of the message at ``start``, and where the next begins. Raises ForeignBytes."""
    size = shift = 0
    at = start
    while True:
        if at >= len(data) or shift > 28:
            raise ForeignBytes(f"the length of the {what} at byte {start} is cut off or not a number")
        byte = data[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    if at + size > len(data):
        raise ForeignBytes(f"the {what} at byte {start} has {size} bytes, and {len(data) - at} are there")
    return data[at : at + size], at + size


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
