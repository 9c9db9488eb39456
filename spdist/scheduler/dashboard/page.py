"""The page as a file: one that requests its data from a scheduler, or one that contains its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spdist.shown import without_secrets

PAGE = Path(__file__).with_name("page.html")
_NO_DATA = '<script type="application/json" id="report">null</script>'


def page_with(data: dict[str, Any]) -> str:
    """Return the page with its data inside, so that it needs no scheduler.

    `data`: as `Runs.to_json` returns it.
    Returns HTML.
    """
    text = json.dumps(without_secrets(data), separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no name may end the script
    page = PAGE.read_text()
    assert page.count(_NO_DATA) == 1
    return page.replace(_NO_DATA, _NO_DATA.replace("null", text))
