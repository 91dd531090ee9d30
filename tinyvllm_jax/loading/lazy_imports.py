"""transformers, imported on first use: it takes two seconds and remarks that PyTorch is missing."""

import os
from types import ModuleType


def import_transformers() -> ModuleType:
    """Imports transformers without its advice to install PyTorch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers
