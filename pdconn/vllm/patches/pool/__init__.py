"""Changes to vLLM's block manager and its block pool, and reads of them.

pinned_blocks     keeps blocks out of the pool by references of our own
kept_windows      frees windows later, for decode's last token
admitted_blocks   the blocks by which a request is admitted, with those that are kept longer
uncached_blocks   keeps blocks that were written in part out of the cache
answer_windows    caches windows at the ends of answers, for the next turn
local_hits        hits of full attention that windows do not have, completed by a pull
state_blocks      blocks of states, and tokens at which a pass ends
"""
