"""KV memory: its layout, its transport and network card, and engines that sleep.

layout      the memory order that vLLM is asked for
opening     the worker's transport, and the cores of its threads
card        the network card that carries KV
cores       the cores that vLLM has bound a model to
quarantine  blocks to which a read may still write
warm        rehearsals and warm-ups before the first request
sleep       engines whose KV memory is unmapped while they sleep
"""
