"""What lies in vLLM's blocks, as pdconn describes it to peers.

arrangement  which backends give a page's bytes the same meaning, by name
compressors   windows of compressors, and their ratios
geometry   KV cache records as byte references
heads      which of the model's heads a rank holds
pages      strides and pieces of a layer's pages, and of kernel blocks
splits     ids of kernel blocks for ids of the engine's blocks
states     recurrent states, in the pieces that tensor parallelism divides
traits     what the bytes mean, by name
"""
