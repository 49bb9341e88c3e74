"""Benchmarks that a user can run: what a pull costs beside what the wire could do, and
(``serving``) what users of the engines see.

workload    what is pulled: two engines' shapes, prompts, block ids          pure
paths       over what: shared memory, huge pages, TCP
arena       memory that looks like an engine's, and a pattern to check it by
control     the words between the side that measures and the side that lends
lender      the side that lends, in a process of its own or on another host
lines       what is compared: ours, one piece, layer by layer, memcpy
rounds      measures them turn by turn
report      a table, a document, a picture
percentile  the one that all of them report
serving     real engines, asked through the router, beside others
"""
