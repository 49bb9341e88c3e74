"""The messages of Envoy's external processor, and of health, as classes of ``protobuf``.  Pure.

A table of fields and their numbers, of which the classes are made at import.  Fields that are not
in it are skipped when they come.  Names do not travel in protobuf, so the classes have a pool of
their own and do not clash with others of the same protocol.

The generated classes on the package index do not fit into an environment of vLLM: ``xds-protos``
replaces the files of ``googleapis-common-protos`` and ``opentelemetry-proto`` by older ones, which
breaks OpenTelemetry's exporter, and ``envoy-data-plane`` parses in Python.  Tests run a real Envoy.

Source: envoy/service/ext_proc/v3/external_processor.proto and what it imports, of Envoy 1.40.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE, CALL = METHOD[1:].split("/")

# Numbers of enumerations.
BUFFERED, FULL_DUPLEX_STREAMED = 2, 4
"""``ProcessingMode.BodySendMode``."""
APPEND, OVERWRITE = 0, 2
"""``HeaderAppendAction``: ``APPEND_IF_EXISTS_OR_ADD`` and ``OVERWRITE_IF_EXISTS_OR_ADD``."""

#: By message: "NUMBER TYPE NAME", with "repeated" before it, or the name of a oneof after it.
#: Enumerations travel as int32.
FIELDS: dict[str, tuple[str, ...]] = {
    "HeaderValue": ("1 string key", "2 string value", "3 bytes raw_value"),
    "HeaderMap": ("repeated 1 HeaderValue headers",),
    "HeaderValueOption": ("1 HeaderValue header", "3 int32 append_action"),
    "HeaderMutation": (
        "repeated 1 HeaderValueOption set_headers",
        "repeated 2 string remove_headers",
    ),
    "HttpStatus": ("1 int32 code",),
    "Attribute": ("1 string key", "2 Struct value"),
    "FilterMetadata": ("1 string key", "2 Struct value"),
    "Metadata": ("repeated 1 FilterMetadata filter_metadata",),
    "ProtocolConfiguration": ("1 int32 request_body_mode", "2 int32 response_body_mode"),
    "HttpHeaders": ("1 HeaderMap headers", "3 bool end_of_stream"),
    "HttpBody": ("1 bytes body", "2 bool end_of_stream"),
    "HttpTrailers": ("1 HeaderMap trailers",),
    "ProcessingRequest": (
        "2 HttpHeaders request_headers request",
        "3 HttpHeaders response_headers request",
        "4 HttpBody request_body request",
        "5 HttpBody response_body request",
        "6 HttpTrailers request_trailers request",
        "7 HttpTrailers response_trailers request",
        "8 Metadata metadata_context",
        "repeated 9 Attribute attributes",
        "11 ProtocolConfiguration protocol_config",
    ),
    "StreamedBodyResponse": ("1 bytes body", "2 bool end_of_stream"),
    "BodyMutation": ("1 bytes body mutation", "3 StreamedBodyResponse streamed_response mutation"),
    "CommonResponse": ("2 HeaderMutation header_mutation", "3 BodyMutation body_mutation"),
    "HeadersResponse": ("1 CommonResponse response",),
    "BodyResponse": ("1 CommonResponse response",),
    "TrailersResponse": ("1 HeaderMutation header_mutation",),
    "ImmediateResponse": (
        "1 HttpStatus status",
        "2 HeaderMutation headers",
        "3 bytes body",
        "5 string details",
    ),
    "ProcessingResponse": (
        "1 HeadersResponse request_headers response",
        "2 HeadersResponse response_headers response",
        "3 BodyResponse request_body response",
        "4 BodyResponse response_body response",
        "5 TrailersResponse request_trailers response",
        "6 TrailersResponse response_trailers response",
        "7 ImmediateResponse immediate_response response",
        "8 Struct dynamic_metadata",
    ),
    # grpc.health.v1
    "HealthCheckRequest": ("1 string service",),
    "HealthCheckResponse": ("1 int32 status",),
}

_PACKAGE = "pdconn.ext_proc"
_STRUCT = ".google.protobuf.Struct"
_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
}


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(
        name="pdconn/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, rows in FIELDS.items():
        message = file.message_type.add(name=name)
        oneofs: list[str] = []
        for row in rows:
            number, kind, field_name, *oneof = row.removeprefix("repeated ").split()
            field = message.field.add(name=field_name, number=int(number))
            is_repeated = row.startswith("repeated ")
            field.label = (
                FieldDescriptorProto.LABEL_REPEATED
                if is_repeated
                else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = _STRUCT if kind == "Struct" else f".{_PACKAGE}.{kind}"
            for one in oneof:
                if one not in oneofs:
                    oneofs.append(one)
                    message.oneof_decl.add(name=one)
                field.oneof_index = oneofs.index(one)
    return file


_POOL = DescriptorPool()
_POOL.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_POOL.Add(_file())


def message_class(name: str) -> Any:
    """The class of a message in ``FIELDS``."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest = message_class("ProcessingRequest")
ProcessingResponse = message_class("ProcessingResponse")
HealthCheckRequest = message_class("HealthCheckRequest")
HealthCheckResponse = message_class("HealthCheckResponse")
