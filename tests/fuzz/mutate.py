"""Random and mutated inputs: bytes, texts, JSON values, protobuf messages. All from one generator, so seeds replay."""

import json
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Kind = TypeVar("Kind", bound=Message)

_INTS = (0, 1, -1, 2, 3, 7, 15, 16, 255, 256, 4095, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "\0",
    "\n",
    "../x",
    "²",
    "ü中😀",
    "\u2028",
    "auto",
    "true",
    "null",
    "-1",
    "1e999",
    "{}",
    "[[",
    "x" * 300,
)
_JSON: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**64,
    10**30,
    0.5,
    -1.5,
    1e300,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": {}},
)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def data(random: Random, sample: bytes = b"") -> bytes:
    """Random bytes, or a sample with a few of its bytes changed, cut, doubled or moved."""
    if not sample or random.random() < 0.1:
        return random.randbytes(random.choice((0, 1, 4, 30, 100)))
    changed = bytearray(sample)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        place = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0 if changed:
                changed[min(place, len(changed) - 1)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 1:
                del changed[place : place + random.choice((1, 2, 8, 50))]
            case 2:
                changed[place:place] = random.randbytes(random.choice((1, 2, 8)))
            case 3:
                stop = place + random.choice((1, 4, 20))
                changed[place:place] = changed[place:stop] * random.choice((1, 1, 30))
            case _ if changed:
                changed[min(place, len(changed) - 1)] ^= 1 << random.randrange(8)
    return bytes(changed)


def any_data(random: Random, sample: bytes) -> bytes:
    """As `data`, except that JSON is mostly changed as a value."""
    if sample[:1] in b"{[" and random.random() < 0.7:
        try:
            return json.dumps(json_value(random, json.loads(sample))).encode()
        except (ValueError, RecursionError):
            pass
    return data(random, sample)


def text(random: Random, sample: str = "") -> str:
    if random.random() < 0.3:
        return random.choice(_TEXTS)
    return data(random, sample.encode(errors="replace")).decode(errors="replace")


def number(random: Random) -> int:
    return random.choice((random.choice(_INTS), -random.choice(_INTS), random.randrange(100), random.randrange(2**70)))


def json_value(random: Random, sample: Any, others: Sequence[Any] = _JSON) -> Any:
    """The sample with some of its values replaced, removed, renamed or moved; rarely nested without end."""
    sample = json.loads(json.dumps(sample))
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        sample = _changed(random, sample, others)
    return sample


def _changed(random: Random, value: Any, others: Sequence[Any]) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        match random.randrange(12):
            case 0:
                del value[key]
            case 1:
                value[text(random, key)] = value.pop(key)
            case 2:
                value[random.choice(list(value))] = deepcopy(value[key])
            case _:
                value[key] = _changed(random, value[key], others)
        return value
    if isinstance(value, list) and value and random.random() < 0.9:
        place = random.randrange(len(value))
        match random.randrange(8):
            case 0:
                del value[place]
            case 1:
                value.append(deepcopy(value[place]))
            case 2:
                return value[place]
            case _:
                value[place] = _changed(random, value[place], others)
        return value
    match random.randrange(8):
        case 0 if isinstance(value, str):
            return text(random, value)
        case 1 if isinstance(value, int | float):
            return number(random)
        case 2 if isinstance(value, int | float):
            return value * random.choice((-1, 2, 1000, 0.5))
        case 3:
            return [value]
        case 4:
            return {"a": value}
        case 5:
            deep: Any = value
            for _ in range(random.choice((3, 30, 120))):
                deep = [deep]
            return deep
        case _:
            return deepcopy(random.choice(others))


def message(random: Random, kind: type[Message], depth: int = 4) -> Message:
    """A message with random values in some of its fields, most of them at the ends of their ranges."""
    made = kind()
    for field in _fields(kind):
        if random.random() < (0.5 if depth > 2 else 0.75):
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            _fill_map(random, getattr(made, field.name), field)
        elif field.is_repeated:
            for _ in range(random.choice((0, 1, 1, 2, 5))):
                _add(random, getattr(made, field.name), field, depth)
        elif field.message_type is not None:
            if depth:
                getattr(made, field.name).CopyFrom(message(random, _class_of(made, field.name), depth - 1))
        else:
            setattr(made, field.name, _scalar(random, field))
    return made


def changed_message(random: Random, sample: Kind) -> Kind:
    """A copy of the sample with some of its fields, at any depth, set to something else."""
    made = type(sample)()
    made.CopyFrom(sample)
    for _ in range(random.choice((1, 1, 2, 3))):
        _change_field(random, made)
    return made


def _change_field(random: Random, made: Message) -> None:
    field = random.choice(_fields(type(made)))
    is_message = field.message_type is not None and not field.is_repeated
    if is_message and made.HasField(field.name) and random.random() < 0.8:
        _change_field(random, getattr(made, field.name))
        return
    others = message(random, type(made))
    if field.is_repeated:
        if random.random() < 0.5:
            made.ClearField(field.name)
        only = type(made)()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(random, getattr(only, field.name), field)
        else:
            getattr(only, field.name).extend(getattr(others, field.name))
        made.MergeFrom(only)
    elif is_message:
        getattr(made, field.name).CopyFrom(getattr(others, field.name))
    else:
        setattr(made, field.name, _scalar(random, field))


def _fields(kind: type[Message]) -> list[Any]:
    """Descriptors of its fields. They have two classes, which the stubs hold to be different."""
    return list(kind.DESCRIPTOR.fields)


def _class_of(made: Message, name: str) -> type[Message]:
    return type(getattr(made, name))


def _add(random: Random, values: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is None:
        values.append(_scalar(random, field))
    elif depth:
        added = values.add()
        added.CopyFrom(message(random, type(added), depth - 1))


def _fill_map(random: Random, values: Any, field: FieldDescriptor) -> None:
    assert field.message_type is not None, "entries of a map are messages"
    fields = field.message_type.fields_by_name
    for _ in range(random.choice((0, 1, 3))):
        key = _scalar(random, fields["key"])
        if fields["value"].message_type is None:
            values[key] = _scalar(random, fields["value"])
        else:
            values[key].CopyFrom(message(random, type(values[key]), 1))


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        low, high = _BITS[kind]
        return min(high, max(low, number(random)))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None, "it is an enum"
        return random.choice([*field.enum_type.values_by_number, 99])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return random.choice(
            (*(each for each in _FLOATS if abs(each) < 1e38 or each in (float("inf"),)), random.random())
        )
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return random.choice((*_FLOATS, random.random()))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return data(random, b"some bytes")
    return text(random, "a text")
