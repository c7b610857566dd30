"""The exact dry run: the memory of one rank, by running the trainer's own code on a device that is not there.

    fake_device, kernels    the device, and what it would run
    build, nf4              the model and its engine on it
    tracker, step           live bytes, and the runtime's step, which reports each event
    allocator               from live bytes to what torch's allocator reserves
    checks                  supported requests, and conditions that a result must meet
    dry_run                 all of it: from a request to a result
    golden                  the file of known runs

It runs in a process of its own (`python -m shardwise.trainer.simulation`): see docs/memory-model.md.
"""
