"""Bytes as people read them."""


def gib(size_bytes: float) -> str:
    """71.2 GiB; MiB below one."""
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.1f} GiB"
