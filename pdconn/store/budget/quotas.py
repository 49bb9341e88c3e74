"""What each tenant of a root keeps while rows are evicted, and who is named in metrics.  Pure.

Rows are taken of those that hold more than their quota, whatever others use.  Where the quotas of
all together are more than there is room for, each keeps an even share instead: the level to which
what remains would rise in vessels as wide as each other and as deep as what each holds::

    held      A ##########  B ######  C ##        quota 8, 12 remain
    level     A #####       B #####   C ##        = 5: A and B give rows, C gives none
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MOST_NAMED = 16
"""Tenants that metrics name in the life of a process; all others are one."""
NAMED_FRACTION = 64
"""A tenant is named once it has this fraction of what all have."""
_FEW = 16
"""Requests for which no tenant is named, though there are few others yet."""
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


class NamedTenants:
    """The tenants that metrics name, for good: those that had a fraction of all at some time.

    So a client that sends many salts neither makes labels nor takes the names of others.
    """

    def __init__(self) -> None:
        self._named: set[bytes] = set()

    def learn_amount(self, tenant: bytes, amount: int, total: int) -> None:
        """Name a tenant that has ``amount`` of ``total``, if it is much and there are few names."""
        is_large = amount * NAMED_FRACTION >= total
        if tenant and is_large and len(self._named) < MOST_NAMED:
            self._named.add(tenant)

    def label(self, tenant: bytes) -> str:
        """What metrics call a tenant."""
        if not tenant:
            return NO_TENANT
        return tenant.hex() if tenant in self._named else OTHERS

    def labels(self) -> list[str]:
        """All labels."""
        return [*(tenant.hex() for tenant in self._named), NO_TENANT, OTHERS]


class TenantCounts:
    """Counts by tenant, under a bounded number of labels.

    Attributes:
        counts: by ``<name>/<label>``; the owner takes them.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._names = NamedTenants()
        self._requests: Counter[bytes] = Counter()
        self._total = 0

    def add_request(self, tenant: bytes) -> None:
        """Note a request of a tenant: who sends many of all is named."""
        if len(self._requests) > MOST_NAMED * NAMED_FRACTION:
            # Each that has a fraction of all is among so many; the others begin anew.
            self._requests = Counter(dict(self._requests.most_common(NAMED_FRACTION)))
        self._requests[tenant] += 1
        self._total += 1
        if self._requests[tenant] >= _FEW:
            self._names.learn_amount(tenant, self._requests[tenant], self._total)

    def add(self, name: str, tenant: bytes, amount: int = 1) -> None:
        """Count something of a tenant's."""
        self.counts[f"{name}/{self._names.label(tenant)}"] += amount


class TenantQuota:
    """The quota of every tenant, and the names of those that metrics name.

    Args:
        nbytes: what no tenant loses to others.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._names = NamedTenants()

    def kept_by_each(self, held: Mapping[bytes, int], freed: int) -> int:
        """Bytes that a tenant keeps for certain while ``freed`` bytes go."""
        return kept_by_each(held, freed, self._nbytes)

    def bytes_by_label(self, held: Mapping[bytes, int]) -> dict[str, int]:
        """Bytes of the named tenants, of rows without a tenant, and of all others."""
        total = sum(held.values())
        for tenant, nbytes in held.items():
            self._names.learn_amount(tenant, nbytes, total)
        found = dict.fromkeys(self._names.labels(), 0)
        for tenant, nbytes in held.items():
            found[self._names.label(tenant)] += nbytes
        return found
