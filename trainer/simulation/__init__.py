"""The exact dry run: the memory of one rank, by running the trainer's own code on a device that is not there.

    fake_device, kernels    the device, and what it would run
    build, nf4              the model and its engine on it
    tracker, step           live bytes, and the runtime's step told which event begins
    allocator               from live bytes to what torch's allocator reserves
    checks                  what can be asked, and what has to be true of an answer
    dry_run                 all of it: a request in, an answer out
    golden, explain         the file of known runs; an answer in words

It runs in a process of its own (`python -m shardwise.trainer.simulation`): see docs/dry-run.md.
"""
