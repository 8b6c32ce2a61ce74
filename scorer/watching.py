"""The watch of a completion that a target writes: it ends the completion where its final answer is complete.

prompt ── a thought left open? ─┐
prefix ─────────────────────────┴─▶ the beginning, in which no answer counts
token by token ── text ──▶ `common/prompts/answer_end.py` ── True: the engine ends the row
"""

from prefixrl.common.engines.interface.base import TokenIds, Watch
from prefixrl.common.prompts.answer_end import AnswerWatch, open_thought
from prefixrl.common.prompts.rendering import Texts


def watch_of(texts: Texts, prompt: TokenIds, prefix: TokenIds, answer: TokenIds) -> Watch:
    """Return the watch of a row of `prompt` and `answer`, of which another model has written the `prefix`."""
    read_piece = texts.piece_reader()
    pieces = [read_piece(token) for token in answer.tolist()]
    beginning = "".join(pieces[: prefix.size])
    watch = AnswerWatch(open_thought(texts.decode_with_special(prompt)) + beginning)
    # A text that is extended goes on behind what the target wrote before its limit.
    for piece in pieces[prefix.size :]:
        watch.add_piece(piece)
    return lambda token: watch.add_piece(read_piece(token))
