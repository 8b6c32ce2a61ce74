"""`report.html`: the page of the dashboard as one file that holds its scripts, its style and the data of a run."""

import base64
import hashlib
import re
from functools import partial
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "page"
"""The files of the page, as the dashboard serves them."""
SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')


def page(message: object) -> str:
    """Return the page that shows a message of the dashboard: parts by run (`page.js`).

    Its policy lets only these scripts and styles act, by their digests, and nothing be fetched.
    """
    digests: dict[str, list[str]] = {"script": [], "style": []}

    def inlined(kind: str, match: re.Match[str]) -> str:
        text = (FOLDER / match[1]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    html = SCRIPT.sub(partial(inlined, "script"), html)
    html = STYLE.sub(partial(inlined, "style"), html)
    rules = [f"{kind}-src {' '.join(each)}" for kind, each in digests.items()]
    rules += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    policy = "; ".join(["default-src 'none'", *rules])
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # No text of a model can end the block: it has no "<".
    data = msgspec.json.encode(message).decode().replace("<", "\\u003c")
    before, _, after = html.replace("<head>", head, 1).partition('<main id="main"></main>')
    return f'{before}<main id="main"></main>\n<script type="application/json" id="data">{data}</script>{after}'
