"""Plans and submissions for a Slurm cluster, from a login node."""
