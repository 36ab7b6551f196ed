"""Sizes: bytes as people read them, divisors, lists of numbers."""

from math import isqrt


def gib(size_bytes: float) -> str:
    """71.2 GiB; MiB below one."""
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.1f} GiB"


def unit_for(largest_bytes: float) -> tuple[str, int]:
    """("GiB", 2**30), or ("MiB", 2**20) where all is smaller than one GiB."""
    return ("MiB", 2**20) if largest_bytes < 2**30 else ("GiB", 2**30)


def divisors(n: int) -> list[int]:
    """In ascending order, found up to the square root."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def listed(values: list[int]) -> str:
    """2, 4, 8; of many the first ones."""
    return ", ".join(map(str, values)) if len(values) <= 12 else ", ".join(map(str, values[:11])) + ", …"
