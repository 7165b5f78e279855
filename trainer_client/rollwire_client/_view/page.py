from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwire_client._view.page_data import PageData

SCRIPTS = ("data", "search", "tokens", "group", "list", "header", "app")
_PLACE = re.compile(r"<!--(\w+)-->")


def render_page(name: str, summary: str, data: PageData) -> str:
    """The page as one text.

    Its policy lets no script but its own run, and nothing be fetched, whatever the data says.
    """
    folder = files(__package__)
    style = folder.joinpath("view.css").read_text("utf-8")
    script = "\n".join(folder.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "title": html.escape(name),
        "style": f"<style>{style}</style>",
        "overview": _data("overview", _json({"name": name, "summary": summary, **data.overview})),
        "token_ids": _data("token-ids", data.token_ids),
        "logprobs": _data("logprobs", data.logprobs),
        "script": f"<script>{script}</script>",
    }
    template = folder.joinpath("template.html").read_text("utf-8")
    return _PLACE.sub(lambda match: parts[match[1]], template)


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(value: Any) -> str:
    """JSON that no HTML parser mistakes for its own: it has no ``<``."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(name: str, content: str) -> str:
    """Browsers do not run a script of this type."""
    return f'<script type="application/json" id="{name}">{content}</script>'
