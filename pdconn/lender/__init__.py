"""The prefill side of the side channel: sessions of readers, leases, admission, checksums."""
