"""The parts of Perfetto's published schema that ringsim writes or reads.

They are copied from protos/perfetto/trace of https://github.com/google/perfetto, independently of
``exchange/schemas.py``.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

FieldType = descriptor_pb2.FieldDescriptorProto

PERFETTO = {
    "Trace": "1 packet TracePacket*",
    "TracePacket": "8 timestamp uint64, 10 sequence uint32, 11 track_event TrackEvent, "
    "12 interned_data InternedData, 13 flags uint32, 59 defaults TracePacketDefaults, 60 "
    "track_descriptor TrackDescriptor",
    "TracePacketDefaults": "11 track_event_defaults TrackEventDefaults",
    "TrackEventDefaults": "11 track_uuid uint64",
    "TrackDescriptor": (
        "1 uuid uint64, 2 name string, 3 process ProcessDescriptor, 5 parent_uuid uint64"
    ),
    "ProcessDescriptor": "1 pid int32, 6 process_name string",
    "TrackEvent": "3 category_iids uint64*, 4 debug_annotations DebugAnnotation*, 9 type int32, 10 "
    "name_iid uint64, 11 track_uuid uint64, "
    "22 categories string*, 23 name string, 47 flow_ids fixed64*, 48 terminating_flow_ids fixed64*",
    "DebugAnnotation": (
        "1 name_iid uint64, 10 name string, 4 int_value int64, 6 string_value string, 12 "
        "array_values DebugAnnotation*"
    ),
    "InternedData": (
        "1 event_categories Interned*, 2 event_names Interned*, 3 debug_annotation_names Interned*"
    ),
    "Interned": "1 iid uint64, 2 name string",
}


def compile_schema(messages: dict[str, str]) -> dict[str, Any]:
    """Returns the message classes; a field is "number name type", with a star if it repeats."""
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto2")
    for name, text in messages.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (one.split() for one in text.split(",")):
            repeated, base = kind.endswith("*"), kind.rstrip("*")
            told: dict[str, Any] = (
                {"type": FieldType.TYPE_MESSAGE, "type_name": f".p.{base}"}
                if base in messages
                else {"type": getattr(FieldType, f"TYPE_{base.upper()}")}
            )
            label = FieldType.LABEL_REPEATED if repeated else FieldType.LABEL_OPTIONAL
            message.field.add(name=field, number=int(number), label=label, **told)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))
        for name in messages
    }


def parse_whole(kind: Any, data: bytes) -> Any:
    """Returns the parsed message; fails if the schema lacks one of its fields."""
    message = kind()
    message.ParseFromString(data)
    assert_known(message)
    assert message.SerializeToString() == data
    return message


def assert_known(message: Any) -> None:
    assert len(UnknownFieldSet(message)) == 0, f"{message.DESCRIPTOR.name} has an unknown field"
    for field, value in message.ListFields():
        if field.type == FieldType.TYPE_MESSAGE:
            for one in [value] if hasattr(value, "ListFields") else value:
                assert_known(one)
