"""What this engine lends: finished prompts, prefixes that are asked for, answers.

lending    the scheduler's part: pins what is lent, writes tickets, unpins what was read
prefixes   a part of what this engine holds, on request
answers    prompt and answer, for the next turn of a conversation
tickets    what tickets say, and which ones are lent; one for the answers of a best-of-n request
pins       what leases pin, and what gives way
waits      which requests wait for blocks
prompts    the share of the blocks that prompts for others may take
"""
