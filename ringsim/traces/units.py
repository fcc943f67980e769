"""Formats numbers with units or nouns, and the beginnings of sentences, for pictures and messages.

Byte units are powers of 1024; a time gets the largest unit in which it is at least 1.
"""

from __future__ import annotations

import re

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
RATE_UNITS = ((1.0, "GB/s"), (1e-3, "MB/s"), (1e-6, "kB/s"), (1e-9, "B/s"))
TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
# torch's own names of spans, and the names to show for them
_FRIENDLY = (
    (re.compile(r"enumerate\(DataLoader\)#.*"), "data loader"),
    (re.compile(r"DistributedDataParallel\.forward"), "forward (DDP)"),
    (re.compile(r"torch\.autograd\.backward"), "backward (autograd)"),
    (re.compile(r"FullyShardedDataParallel\.forward"), "forward (FSDP)"),
    (re.compile(r"Optimizer\.step#(\w+)\.step"), r"optimizer \1"),
    (re.compile(r"Optimizer\.zero_grad#(\w+)\.zero_grad"), r"optimizer \1: zero_grad"),
)
_COMPUTE = re.compile(r"compute (\d+\.?\d*(?:e[+-]\d+)?) s")  # a span of ringsim.compute


def count(number: int, noun: str) -> str:
    """Formats a number with its noun, such as "1 rank" or "12,000 messages".

    Example:
        >>> count(1, "rank"), count(12000, "message"), count(2, "microbatch")
        ('1 rank', '12,000 messages', '2 microbatches')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def capitalise(text: str) -> str:
    """Returns a text that begins with a capital letter.

    Example:
        >>> capitalise("rank 0 uses NCCL")
        'Rank 0 uses NCCL'
    """
    return text[:1].upper() + text[1:]


def bytes_text(size_bytes: float) -> str:
    """Formats a size with an IEC unit.

    Args:
        size_bytes: the size in bytes; must not be negative.

    Returns:
        The text, usually with three significant digits.

    Example:
        >>> bytes_text(0), bytes_text(4096), bytes_text(1_500_000)
        ('0 B', '4 KiB', '1.43 MiB')
    """
    value, unit = float(size_bytes), 0
    while round(value, 2) >= 1024 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_short(value)} {BYTE_UNITS[unit]}"


def time_unit(length_ns: float) -> tuple[float, str]:
    """Chooses the most readable unit for a duration.

    Args:
        length_ns: the duration in ns.

    Returns:
        The length of the unit in ns, and the unit's name.

    Example:
        >>> time_unit(25_000_000), time_unit(0)
        ((1000000.0, 'ms'), (1.0, 'ns'))
    """
    for factor, name in TIME_UNITS:
        if length_ns >= factor:
            return factor, name
    return TIME_UNITS[-1]


def time_text(length_ns: float) -> str:
    """Formats a duration, given in ns, with a suitable unit.

    Example:
        >>> time_text(12_345_678), time_text(900), time_text(0)
        ('12.3 ms', '900 ns', '0 ns')
    """
    factor, name = time_unit(length_ns)
    return f"{_short(length_ns / factor)} {name}"


def span_text(name: str) -> str:
    """Formats a span's name for display.

    In the name of a ``ringsim.compute`` span, the duration gets a suitable unit. The names of
    torch's own annotations become shorter.

    Example:
        >>> span_text("compute 1e-05 s"), span_text("Optimizer.step#SGD.step")
        ('compute 10 µs', 'optimizer SGD')
    """
    asked = _COMPUTE.fullmatch(name)
    if asked is not None:
        return f"compute {time_text(1e9 * float(asked[1]))}"
    return next(
        (made.expand(text) for known, text in _FRIENDLY if (made := known.fullmatch(name))), name
    )


def rate_text(gb_per_s: float) -> str:
    """Formats a bandwidth, given in GB/s (10**9 bytes per second), with a suitable unit.

    Example:
        >>> rate_text(2.14), rate_text(0.00021), rate_text(0)
        ('2.14 GB/s', '210 kB/s', '0 B/s')
    """
    factor, name = next((unit for unit in RATE_UNITS if gb_per_s >= unit[0]), RATE_UNITS[-1])
    return f"{_short(gb_per_s / factor)} {name}"


def _short(value: float) -> str:
    """Formats a number with three significant digits, but keeps all digits before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
