"""Griffe extension: a section `Example:` of a docstring is one of code, as `Examples:` is."""

from typing import Any

import griffe


class CodeExamples(griffe.Extension):
    """Rename the section before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section of an object that has just been read."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
