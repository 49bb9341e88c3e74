"""What lies in vLLM's blocks, as pdconn describes it to peers.

compressors   windows of compressors, and their ratios
geometry   KV cache records as byte references
heads      which of the model's heads a rank holds
states     recurrent states, in the pieces that tensor parallelism divides
traits     what the bytes mean, by name
"""
