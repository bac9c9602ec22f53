"""The error for a name that is not in a registry; says which one was probably meant.

Knows no registry itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(setting: str, name: object, known: Iterable[str]) -> ValueError:
    """Error to raise, such as "correction='wmlr': unknown; did you mean 'wmrl'? one of real, raw, wmrl"."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{setting}={name!r}: unknown;{hint} one of {', '.join(known)}")
