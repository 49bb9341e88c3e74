"""The first request of fresh engines; see :mod:`tests.throughput.first_request.__main__`."""
