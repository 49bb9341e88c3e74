"""Key files of encrypted stores."""

from __future__ import annotations

from pathlib import Path

NAMES = bytes(range(1, 33))
KEYS = tuple(bytes([number] * 16 + list(range(16))) for number in (0xA1, 0xB2, 0xC3))


def key_file(path: Path, *keys: bytes, names: bytes = NAMES) -> str:
    """Write a key file that only its owner can read; its path."""
    lines = [f"names {names.hex()}", *(f"key {key.hex()}" for key in keys)]
    path.write_text("# of a test\n" + "\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o600)
    return str(path)
