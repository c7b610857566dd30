"""Measured rates of this machine: devices, links, disks."""
