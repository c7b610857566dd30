"""Engines: what Accelerate, DeepSpeed and FSDP2 build, and its verification."""
