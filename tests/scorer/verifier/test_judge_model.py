"""The judge model of the docs: asked only where symbols fail, over a real connection."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prefixrl.common.config.foreign import user_function
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.paths import ROOT


@contextmanager
def judge_model(asked: list[str]) -> Iterator[str]:
    """A chat endpoint that says yes where the answer is some form of east."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = body["messages"][0]["content"]
            asked.append(text)
            said = (
                "Yes" if re.search(r"^Answer: .*(due east|sunrise)", text, re.MULTILINE) else "No"
            )
            content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()


def of_the_docs() -> str:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/objectives.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (result,) = (each for each in blocks if "JUDGE_URL" in each)
    return result


def judged(place: str, golds: dict[str, str]) -> list[Judgement]:
    pool = VerifierPool(1, 60, RewardFunction(place, function_digest(place)))
    results: dict[int, Judgement] = {}
    try:
        for key, (text, gold) in enumerate(golds.items()):
            pool.submit(key, text, gold, "Where is it?")
        while pool.pending:
            pool.wait(1.0)
            results |= dict(pool.poll())
    finally:
        pool.close()
    return [results[key] for key in range(len(golds))]


def test_the_judge_of_the_docs_is_asked_only_where_the_verifier_says_wrong(tmp_path: Path) -> None:
    asked: list[str] = []
    with judge_model(asked) as url:
        source = f"JUDGE_URL = {url!r}\n{of_the_docs()}"
        (tmp_path / "mine.py").write_text(source)
        place = user_function.resolve("reward.function", "mine.py:score", tmp_path)
        golds = {
            r"\boxed{0.5}": r"\frac12",
            r"\boxed{\text{due east}}": "east",
            r"\boxed{west}": "east",
            "none": "east",
        }
        verdicts = judged(place, golds)
    assert [(each.reward, each.status) for each in verdicts] == [
        (1.0, "ok"),
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "ok"),
    ]
    assert sorted(re.findall(r"^Answer: (.*)$", "\n".join(asked), re.MULTILINE)) == [
        r"\text{due east}",
        "west",
    ]


def test_the_judges_own_lines_are_ten() -> None:
    body = of_the_docs().partition("def score")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
