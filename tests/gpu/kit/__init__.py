"""What travels to a machine with a GPU and no network, and what runs there.

    make gpu-kit          writes .gpu-kit/, at most 60 MiB, and prints the commands to run there

    build         downloads, slims and packs; checks sizes and the commands' length
    slim          which files of NIXL's wheel are needed
    vllm_files    vLLM's Python files, with ``native`` in place of its compiled ones
    run           copied into the kit: unpacks it, then runs the steps, each with a time limit
    steps         (a) NIXL on device memory, (b) ``tests/gpu``, (c) vLLM, (d) hand-over, (e) graphs,
                  (f) streams, (g) a store
    engine_process  one vLLM engine, as the steps from (c) on start them
    engines       options and start of those that the steps from (d) on compare
    native        stands in for vLLM's compiled kernels, in the unpacked vLLM
    on_meta       how far (c) comes without a card

A step writes what it found to a file of JSON after each part of it, so that a time limit costs
only what comes after.  Every step takes ``--device cpu`` too: so they are tested without a card.
"""
