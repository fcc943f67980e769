"""The Perfetto protocol-buffer messages that ringsim writes and reads.

Only the fields that ringsim uses are declared; protobuf skips all others. Enumerations are declared
as integers, which have the same encoding.

Source:
    protos/perfetto/trace in https://github.com/google/perfetto (trace_packet, track_descriptor,
    track_event, debug_annotation, interned_data)
"""

from __future__ import annotations

from functools import cache
from typing import Any

# Each field reads "number name type", with a star if it repeats.
_MESSAGES = {
    "Trace": ("1 packet TracePacket*",),
    "TracePacket": (
        "8 timestamp uint64",
        "10 trusted_packet_sequence_id uint32",
        "11 track_event TrackEvent",
        "12 interned_data InternedData",
        "13 sequence_flags uint32",
        "59 trace_packet_defaults TracePacketDefaults",
        "60 track_descriptor TrackDescriptor",
    ),
    "TracePacketDefaults": ("11 track_event_defaults TrackEventDefaults",),
    "TrackEventDefaults": ("11 track_uuid uint64",),
    "TrackDescriptor": (
        "1 uuid uint64",
        "2 name string",
        "3 process ProcessDescriptor",
        "4 thread ThreadDescriptor",
        "5 parent_uuid uint64",
    ),
    "ProcessDescriptor": ("1 pid int32", "6 process_name string"),
    "ThreadDescriptor": ("1 pid int32",),
    "TrackEvent": (
        "3 category_iids uint64*",
        "4 debug_annotations DebugAnnotation*",
        "9 type int32",
        "10 name_iid uint64",
        "11 track_uuid uint64",
        "22 categories string*",
        "23 name string",
        "47 flow_ids fixed64*",
        "48 terminating_flow_ids fixed64*",
    ),
    "DebugAnnotation": (
        "1 name_iid uint64",
        "4 int_value int64",
        "6 string_value string",
        "10 name string",
    ),
    "InternedData": (
        "1 event_categories InternedName*",
        "2 event_names InternedName*",
        "3 debug_annotation_names InternedName*",
    ),
    "InternedName": ("1 iid uint64", "2 name string"),
}


@cache
def perfetto_trace() -> Any:
    """Returns the class of a whole file, a message that consists of the others."""
    # on use: a program that reads no Perfetto file loads no protobuf
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type, features = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FeatureSet
    package = "ringsim.perfetto"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="editions"
    )
    # this edition checks strings (unlike proto2) and allows missing numbers (unlike proto3)
    file.edition = descriptor_pb2.EDITION_2023
    file.options.features.repeated_field_encoding = features.EXPANDED  # as proto2 does
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            number, field, kind = text.split()
            base = kind.rstrip("*")
            added = message.field.add(name=field, number=int(number))
            added.label = (
                field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            )
            if base in _MESSAGES:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".{package}.{base}"
            else:
                added.type = field_type.Type.Value(f"TYPE_{base.upper()}")
    # a separate pool, because the process may also have loaded the published schema
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Trace"))


def plain_text(text: str) -> str:
    r"""Returns a string with lone surrogates escaped, so that a file can store the string.

    Example:
        >>> plain_text("a\ud800")
        'a\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
