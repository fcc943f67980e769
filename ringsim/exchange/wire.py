"""The wire format of protocol buffers: enough of it to write and to read the messages of two published schemas.

A message is a sequence of fields, each a number, a wire type and a value::

    08 96 01          field 1, type 0 (a whole number of 7 bits a byte, the lowest first): 150
    12 02 68 69       field 2, type 2 (a length, then so many bytes): "hi"

Source:
    "Encoding", https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

__all__ = ["as_int64", "bytes_field", "fields", "fixed_field", "number", "number_field", "read_number", "text_field"]

NUMBER: Final = 0
_EIGHT, _BYTES, _FOUR = 1, 2, 5
_MASK: Final = 2**64 - 1
_SMALL: Final = [bytes([value]) for value in range(128)]


def number(value: int) -> bytes:
    """Writes a whole number; one below 0 as its two's complement of 64 bits.

    Example:
        >>> number(150).hex(), number(-1).hex()
        ('9601', 'ffffffffffffffffff01')
    """
    if 0 <= value < 128:  # nearly all are
        return _SMALL[value]
    value &= _MASK
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def number_field(field: int, value: int) -> bytes:
    """Writes a field that holds a whole number."""
    return number(field << 3 | NUMBER) + number(value)


def fixed_field(field: int, value: int) -> bytes:
    """Writes a field that holds a whole number from 0 in eight bytes."""
    return number(field << 3 | _EIGHT) + struct.pack("<Q", value)


def bytes_field(field: int, value: bytes) -> bytes:
    """Writes a field that holds bytes, or a message."""
    return number(field << 3 | _BYTES) + number(len(value)) + value


def text_field(field: int, value: str) -> bytes:
    """Writes a field that holds words; half a character of UTF-16 is written out."""
    return bytes_field(field, value.encode("utf-8", "backslashreplace"))


def as_int64(value: int) -> int:
    """Returns a number that was read as one with a sign.

    Example:
        >>> as_int64(2**64 - 1)
        -1
    """
    return value - 2**64 if value >= 2**63 else value


def read_number(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """Returns the whole number at a place, and the place after it.

    Raises:
        ValueError: there is none.
    """
    if place < len(data) and data[place] < 0x80:  # nearly all are
        return data[place], place + 1
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("a number does not end")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, place
        shift += 7


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number and the value of each field: an int, or the bytes of words and messages.

    Numbers of a fixed size come as the whole number that their bytes are.

    Raises:
        ValueError: the bytes are no message.

    Example:
        >>> [(field, value if isinstance(value, int) else bytes(value)) for field, value in fields(bytes.fromhex("08960112026869"))]
        [(1, 150), (2, b'hi')]
    """
    data = memoryview(data)
    place = 0
    while place < len(data):
        key, place = read_number(data, place)
        field, kind = key >> 3, key & 7
        if field == 0:
            raise ValueError("a field has the number 0")
        if kind == NUMBER:
            value, place = read_number(data, place)
            yield field, value
            continue
        if kind == _BYTES:
            length, place = read_number(data, place)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if length > len(data) - place:
            raise ValueError("a field is longer than its message")
        part = data[place : place + length]
        place += length
        yield field, part if kind == _BYTES else struct.unpack("<Q" if kind == _EIGHT else "<I", part)[0]
