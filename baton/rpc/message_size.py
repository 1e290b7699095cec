"""Counts the fields of a serialized protobuf message before it is parsed. Pure.

The parser runs on the event loop and takes seconds for 32 MiB of empty messages, which are two bytes each.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_SMALL_BYTES = 1 << 16  # such messages are parsed within milliseconds, whatever they contain
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_VARINT_BYTES_MAX = 10
_NUMBER_BYTES_MAX = 5  # of a packed number, as token ids are


def is_too_much(data: bytes, descriptor: Any, *, fields_max: int, numbers_max: int) -> bool:
    """Whether the message, with the messages inside it, has more than `fields_max` fields or `numbers_max` numbers.

    Also True if a field reaches beyond its message, because nothing after it can be counted.

    Args:
        descriptor: of the message's type.
    """
    if len(data) <= _SMALL_BYTES:
        return False
    fields_left, number_bytes_left = fields_max, _NUMBER_BYTES_MAX * numbers_max
    waiting = [(0, len(data), descriptor)]
    while waiting:
        place, end, of = waiting.pop()
        while place < end:
            fields_left -= 1
            if fields_left < 0:
                return True
            key, place = _varint(data, place)
            field = of.fields_by_number.get(key >> 3)
            match key & 7:
                case 0:
                    _, place = _varint(data, place)
                case 1:
                    place += 8
                case 5:
                    place += 4
                case 2:
                    size, place = _varint(data, place)
                    if field is not None and field.message_type is not None:
                        waiting.append((place, place + size, field.message_type))
                    elif field is not None and field.is_repeated and field.type not in _TEXTS:
                        number_bytes_left -= size
                    place += size
                case _:
                    return True  # groups, which no message of ours has
            if place > end or number_bytes_left < 0:
                return True
    return False


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at this place, and the place after it, which is beyond the end if the number is cut off."""
    value = shift = 0
    for byte in data[place : place + _VARINT_BYTES_MAX]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    return value, len(data) + 1
