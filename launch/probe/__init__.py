"""The machine: GPUs, links, host, disks, libraries."""
