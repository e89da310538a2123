"""Text that is safe to print and draw.

Names come from files that strangers wrote, so control characters (terminal escapes among them)
never reach a terminal, a figure or a page.
"""

from __future__ import annotations

import unicodedata

#: Categories of code points that move the cursor, hide or reorder text, or cannot be encoded.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: object) -> str:
    """``text`` on one line, with every control character written as its escape."""
    return "".join(
        char
        if unicodedata.category(char) not in _UNPRINTABLE
        else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )


def one_line(text: object) -> str:
    """``text`` with line breaks turned into spaces, then made printable."""
    return printable(" ".join(str(text).split()))
