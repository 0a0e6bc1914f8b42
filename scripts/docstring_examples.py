"""Lets the reference show examples as code: griffe knows the heading `Examples:` only, not ours.

`mkdocs.yml` names this file as an extension of mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Reads `Example:` as the section that it is."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the heading of a section, as the docstring is read."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
