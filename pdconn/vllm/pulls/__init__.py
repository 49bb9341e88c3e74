"""What this engine pulls.

pulling    the scheduler's part: which ticket is promised, read, given up or failed
tracked    requests with tickets, and checks of the tickets
patience   how long a request waits for a prefix
pulled     vLLM's cache after pulls: blocks written in part, quarantined blocks, answers
"""
