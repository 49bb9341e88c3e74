"""What each tenant of a root keeps while rows are evicted, and who is named in metrics.  Pure.

Rows are taken of those that hold more than their quota, whatever others use.  Where the quotas of
all together are more than there is room for, each keeps an even share instead: the level to which
what remains would rise in vessels as wide as each other and as deep as what each holds::

    held      A ##########  B ######  C ##        quota 8, 12 remain
    level     A #####       B #####   C ##        = 5: A and B give rows, C gives none
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_NAMED = 16
"""Tenants that metrics name in the life of a process; all others are one."""
NAMED_FRACTION = 64
"""A tenant is named once it holds this fraction of what all hold."""
OTHERS, NO_TENANT = "others", "none"


def kept_by_each(held: Mapping[bytes, int], freed: int, quota: int) -> int:
    """Bytes that a tenant keeps for certain while ``freed`` bytes go.

    As long as there is something to free, at least one tenant holds more than that.

    >>> kept_by_each({b"a": 10, b"b": 6, b"c": 2}, 6, 8)
    5
    >>> kept_by_each({b"a": 10, b"b": 6, b"c": 2}, 6, 3)
    3
    """
    left = max(0, sum(held.values()) - freed)
    for number, nbytes in enumerate(sorted(held.values())):
        alike = len(held) - number
        if nbytes * alike > left:
            return min(quota, left // alike)
        left -= nbytes
    return quota


def tenants_above(held: Mapping[bytes, int], kept: int) -> list[bytes]:
    """The tenants of which rows may be taken: they hold more than each keeps."""
    return [tenant for tenant, nbytes in held.items() if nbytes > kept]


class TenantQuota:
    """The quota of every tenant, and the names of those that metrics name.

    Args:
        nbytes: what no tenant loses to others.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._named: set[bytes] = set()

    def kept_by_each(self, held: Mapping[bytes, int], freed: int) -> int:
        """Bytes that a tenant keeps for certain while ``freed`` bytes go."""
        return kept_by_each(held, freed, self._nbytes)

    def bytes_by_label(self, held: Mapping[bytes, int]) -> dict[str, int]:
        """Bytes of the named tenants, of rows without a tenant, and of all others.

        A tenant is named for good once it holds a fraction of all, so that a client which sends
        many salts neither makes labels nor takes the names of others.
        """
        total = sum(held.values())
        for tenant, nbytes in held.items():
            is_large = nbytes * NAMED_FRACTION >= total
            if tenant and is_large and len(self._named) < MOST_NAMED:
                self._named.add(tenant)
        found = {tenant.hex(): held.get(tenant, 0) for tenant in self._named}
        found[NO_TENANT] = held.get(b"", 0)
        found[OTHERS] = total - sum(found.values())
        return found
