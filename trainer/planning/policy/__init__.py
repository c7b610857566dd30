"""What every formula asks first: dtypes and sizes of a configuration, and what differs in other trainers.

precision_policy    dtypes of tensors, attention kernel, sizes of the model
reference_trainers  what differs in other trainers, as values
"""
