"""What pdconn changes in vLLM's block manager and its block pool, and what it reads there.

pinned_blocks     references of our own keep blocks out of the pool
kept_windows      windows are freed later, for decode's last token
admitted_blocks   what a request is admitted by, with what is kept of it
uncached_blocks   blocks written in part are found by nobody
answer_windows    windows at the ends of answers are found by the next turn
local_hits        hits of full attention beside windows that lag behind, completed by a pull
state_blocks      where a state is kept, and where a pass ends
"""
