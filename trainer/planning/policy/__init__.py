"""Dtypes and sizes of a configuration, which every formula reads, and differences of other trainers.

precision_policy    dtypes of tensors, attention kernel, sizes of the model
reference_trainers  what differs in other trainers, as values
"""
