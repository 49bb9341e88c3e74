"""Benchmarks that a user can run: ``pdconn bench transfer`` and ``pdconn bench serve``.

transfer/     the throughput of pulls, beside the limit of the link
serving/      latency and goodput of real engines behind the router, beside other services
manifest      the machine and the versions of a measurement
percentile    the percentile that all benchmarks report
interrupts    Ctrl-C between two steps of a measurement
bench_errors  invalid options, and failures of the remote side
"""
