"""transformers without the classes that a test's model brought: a process keeps them, and every test runs in one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING


@contextmanager
def transformers_as_it_was() -> Iterator[None]:
    """What is imported and registered inside is forgotten after."""
    finders = [*sys.meta_path]
    registered = [(mapping, dict(mapping._extra_content)) for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)]
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        for mapping, content in registered:
            mapping._extra_content.clear()
            mapping._extra_content.update(content)
