"""What this engine lends: finished prompts, prefixes on request, answers.

lending    the scheduler's part: pins lent blocks, writes tickets, unpins blocks of freed leases
prefixes   cached prefixes, on request
answers    prompt and answer, for the next turn of a conversation
tickets    writes tickets, and tracks the lent ones; one for all answers of a best-of-n request
pins       blocks that leases pin, and which leases end early
waits      requests that wait for blocks
prompts    the share of the blocks that prompts for other engines may use
"""
