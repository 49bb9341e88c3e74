"""A transfer benchmark: KV-shaped memory is pulled from a lender in several ways, in turns.

workload         what is pulled: two engines' shapes, prompts, block ids    pure
paths            over which link: shared memory, huge pages, TCP
arena            memory that looks like an engine's, and a pattern to check it by
control          the messages between the side that measures and the side that lends
lender           the side that lends, in a process of its own or on another host
methods          what is compared: ours, one piece, layer by layer, memcpy
moves            one measurement of one method
rig              one case, ready to be measured
bench_pages      what an engine's layout allocates in the arena, with torch
rounds           measures all methods, turn by turn
mooncake         Mooncake's transfer engine, where it is installed
transfer_report  a table, a JSON document, and a plot of throughput against block size
"""
