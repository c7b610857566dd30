"""The recipes, without what is in them."""


class Recipe:
    """What an autocast is opened with."""


class DelayedScaling(Recipe):
    """Scales from earlier steps."""


class Float8CurrentScaling(Recipe):
    """Scales from the tensor at hand."""


class Float8BlockScaling(Recipe):
    """A scale for each block."""


class MXFP8BlockScaling(Recipe):
    """A scale for each 32 elements."""


class NVFP4BlockScaling(Recipe):
    """A scale for each 16 elements of 4 bits."""
