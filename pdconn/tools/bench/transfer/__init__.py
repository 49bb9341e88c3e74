"""A transfer benchmark: pulls KV-shaped memory from a lender by several methods, in turns.

workload         the pulled KV: two engine shapes, prompts, block ids      pure
paths            links: shared memory, huge pages, TCP
arena            memory like an engine's, with a verifiable pattern
control          the messages between the measuring and the lending side
bench_lender     the lending side, in a child process or on another host
methods          the compared methods: ours, one piece, layer by layer, memcpy
moves            one measurement of one method
bench_case       one case, ready to be measured
bench_pages      what an engine's layout allocates in the arena, with torch
rounds           measures all methods, turn by turn
mooncake         Mooncake's transfer engine, if installed
transfer_report  a table, a JSON document, and a plot of throughput against block size
"""
