"""The content of vLLM's blocks, as it is described to peers.

arrangement       how attention backends arrange the bytes of a page, by name
compressors       windows of compressors, and their ratios
drafts            layers of a drafter
geometry          KV cache records as byte references
heads             which of the model's heads a rank holds
kinds             kinds of KV cache by vLLM's specifications
pages             strides and pieces of a layer's pages, and of kernel blocks
partial           blocks of windows that a pull has written in part
splits            ids of kernel blocks for ids of the engine's blocks
recurrent_states  recurrent states, in the pieces that tensor parallelism divides
traits            the meaning of the bytes, by name
transferred       blocks of a request in the groups that are transferred
"""
