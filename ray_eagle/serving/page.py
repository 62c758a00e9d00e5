"""The page at `/`: one self-contained document, and headers that let it talk to nobody but its own server."""

import base64
import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


def _part(kind: str) -> str:
    return (FOLDER / f"page.{kind}").read_text(encoding="utf-8")


@cache
def html() -> str:
    """page.html with page.css and page.js in it."""
    return _part("html").replace("/* page.css */", _part("css")).replace("/* page.js */", _part("js"))


def _hash(kind: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(_part(kind).encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash('js')}; style-src {_hash('css')}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
