"""KV memory as vLLM lays it out, and takes it away while an engine sleeps.

layout   the memory order that vLLM is asked for, and what it means for transfers
sleep    engines whose KV memory is unmapped for a while
"""
