"""Our schema is the SDK's in everything but its package name."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as theirs
from tinker_local.types.wire import tinker_local_wire_pb2 as ours

from tests.types.types_strategies import quick

MESSAGES = sorted(theirs.DESCRIPTOR.message_types_by_name)
GENERATOR = Path(__file__).parents[2] / "packages" / "types" / "generate_proto.py"


def facts(descriptor: Any) -> list[tuple[Any, ...]]:
    """All that decides the wire format of a message, of nested ones (map entries) too."""
    found = [
        (
            descriptor.name,
            descriptor.GetOptions().map_entry,
            field.name,
            field.json_name,
            field.number,
            field.type,
            field.label,
            field.containing_oneof and field.containing_oneof.name,
            field.has_presence,
            (field.type == FieldDescriptor.TYPE_ENUM and field.enum_type.name)
            or (field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.name),
            field.has_default_value,
        )
        for field in descriptor.fields
    ]
    return sorted([*found, *(fact for nested in descriptor.nested_types for fact in facts(nested))], key=str)


def test_schema_has_the_sdks_messages() -> None:
    assert sorted(ours.DESCRIPTOR.message_types_by_name) == MESSAGES
    assert len(MESSAGES) == 23


@pytest.mark.parametrize("name", MESSAGES)
def test_message_is_the_sdks(name: str) -> None:
    mine, other = (module.DESCRIPTOR.message_types_by_name[name] for module in (ours, theirs))
    assert facts(mine) == facts(other)
    assert [oneof.name for oneof in mine.oneofs] == [oneof.name for oneof in other.oneofs]


def test_enums_are_the_sdks() -> None:
    mine, other = (
        {name: {value.name: value.number for value in enum.values} for name, enum in enums.items()}
        for enums in (ours.DESCRIPTOR.enum_types_by_name, theirs.DESCRIPTOR.enum_types_by_name)
    )
    assert mine == other
    assert sorted(mine) == ["DType", "StopReason"]


SCALARS = {
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=9),
    FieldDescriptor.TYPE_STRING: st.text(max_size=5),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 9),  # open: unknown values are kept
}


def fill(draw: st.DrawFn, message: Message) -> None:
    """Set a random choice of the fields of `message`, which may be of either schema."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in fields:
        if not draw(st.booleans()):
            continue
        repeated = field.label == FieldDescriptor.LABEL_REPEATED
        target = getattr(message, field.name)
        if repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            value_field = field.message_type.fields_by_name["value"]
            for key in draw(st.lists(st.text(max_size=3), max_size=2)):
                if value_field.message_type is not None:
                    fill(draw, target[key])
                else:
                    target[key] = draw(SCALARS[value_field.type])
        elif field.message_type is not None:
            for part in [target.add() for _ in range(draw(st.integers(0, 2)))] if repeated else [target]:
                if not repeated:
                    part.SetInParent()
                fill(draw, part)
        elif repeated:
            target.extend(draw(st.lists(SCALARS[field.type], max_size=3)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


@pytest.mark.parametrize(("source", "target"), [(ours, theirs), (theirs, ours)], ids=["ours to SDK", "SDK to ours"])
@pytest.mark.parametrize(
    "name", ["ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse", "SamplingParams"]
)
@quick
@given(data=st.data())
def test_random_messages_survive_the_other_schema_byte_for_byte(
    name: str, source: Any, target: Any, data: st.DataObject
) -> None:
    message = getattr(source, name)()
    fill(data.draw, message)
    sent = message.SerializeToString(deterministic=True)
    read = getattr(target, name).FromString(sent)
    assert read.SerializeToString(deterministic=True) == sent
    read.DiscardUnknownFields()  # nothing was carried along as an unknown field
    assert read.SerializeToString(deterministic=True) == sent
    assert str(read) == str(message)


def test_committed_protobuf_code_is_what_the_schema_generates(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate_proto", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    fresh = generator.generate(tmp_path)
    schemas = ("perfetto_trace", "tinker_local_wire")
    assert [path.name for path in fresh] == [f"{schema}_pb2.{end}" for schema in schemas for end in ("py", "pyi")]
    for path in fresh:
        assert path.read_bytes() == (generator.TARGET / path.name).read_bytes()
