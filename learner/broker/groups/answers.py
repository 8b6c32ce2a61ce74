"""Greedy answers of the target, each kept under the digest of its whole request. Pure.

    request: target, problem, prefix, decoding ──digest──▶ key ──▶ AnswerKept (a journal of their own: RUN/answers)

A greedy answer follows from its request, so it is asked for once: drafts, and rows of evaluations that come again. The
text alone is kept: a scorer judges it anew. With engines that batch continuously, an answer that was computed beside
other rows may differ where rounding decides a token; it is an answer of the target all the same. A run with `bitwise`
keeps drafts alone, each of which is a forward of its own.
"""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from prefixrl.common.journal.records import AnswerKept
from prefixrl.common.run.status import DraftTotal
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    Sampling,
    ScoredGroup,
    TargetText,
    TextVerdict,
)

KEY_BYTES = 16
NO_PREFIX = Row(tokens=b"", logprobs=b"", finish="length", spans=())
"""The row of a question that is asked without a prefix."""


class KeptAnswers:
    """The answers of a run, and those that no file has yet."""

    def __init__(self, target: str, has_advice: bool, keeps_evaluations: bool) -> None:
        """Create an empty store.

        Args:
            target: digest of the target and of all settings by which it is asked.
            has_advice: the prefix is a text in the question, whatever its tokens.
            keeps_evaluations: False: answers of evaluations are asked for each time.
        """
        self._target = target
        self._has_advice = has_advice
        self.keeps_evaluations = keeps_evaluations
        self._answers: dict[bytes, AnswerKept] = {}
        self.records: list[AnswerKept] = []
        """Answers that the server is to write down before it acknowledges anything."""
        self.draft_total = DraftTotal()

    def restore(self, records: Iterable[AnswerKept]) -> None:
        """Take over the answers of a file."""
        for record in records:
            self._add(record)

    def _add(self, record: AnswerKept) -> None:
        self._answers[record.key] = record
        if record.is_draft:
            total = self.draft_total
            self.draft_total = msgspec.structs.replace(
                total,
                requests=total.requests + 1,
                failed=total.failed + (record.finish == "error"),
                empty=total.empty + (record.finish != "error" and not record.text.strip()),
                prompt_tokens=total.prompt_tokens + record.prompt_tokens,
                completion_tokens=total.completion_tokens + record.completion_tokens,
            )

    def key(self, prompt: Prompt, sampling: Sampling, row: Row = NO_PREFIX) -> bytes:
        """Return the digest of a request; gold answer, id and draft of the problem are no part of it."""
        question = prompt.question, prompt.system, prompt.earlier
        prefix = (row.text or "",) if self._has_advice else (row.tokens, row.text)
        request = msgspec.msgpack.encode((self._target, question, prefix, sampling))
        return hashlib.blake2b(request, digest_size=KEY_BYTES).digest()

    def answer(self, key: bytes) -> AnswerKept | None:
        """Return the answer to a request; one whose finish is `error` says that the target gave none."""
        return self._answers.get(key)

    def keep_answer(self, record: AnswerKept) -> None:
        """Keep an answer, unless there is one already."""
        if record.key not in self._answers:
            self._add(record)
            self.records.append(record)

    def texts_of(
        self, groups: Sequence[GroupPrefixes], sampling: Sampling
    ) -> tuple[TargetText | None, ...]:
        """Return the answers to the rows of an evaluation's groups; empty if there are none."""
        if not self._is_kept(sampling):
            return ()
        texts = tuple(
            self._text(self.key(group.prompt, sampling, row))
            for group in groups
            for row in group.rows
        )
        return texts if any(texts) else ()

    def _text(self, key: bytes) -> TargetText | None:
        record = self._answers.get(key)
        if record is None or record.finish == "error":
            return None
        return TargetText(record.text, record.finish)

    def keep_evaluated(self, groups: Sequence[ScoredGroup], sampling: Sampling) -> None:
        """Keep the answers of an evaluation's groups."""
        if not self._is_kept(sampling):
            return
        for group in groups:
            for row, verdict in group.judged_rows:
                if _is_answer(verdict):
                    key = self.key(group.prefixes.prompt, sampling, row)
                    self.keep_answer(record_of(key, verdict))

    def _is_kept(self, sampling: Sampling) -> bool:
        return self.keeps_evaluations and sampling.temperature == 0.0


def record_of(
    key: bytes, verdict: TextVerdict, is_draft: bool = False, prompt_tokens: int = 0
) -> AnswerKept:
    """Return the record of a judged answer."""
    return AnswerKept(
        key=key,
        text=verdict.completion,
        finish=verdict.finish,
        is_draft=is_draft,
        prompt_tokens=prompt_tokens,
        completion_tokens=verdict.completion_tokens,
    )


def _is_answer(verdict: TextVerdict) -> bool:
    """Return True if the target was asked and answered, perhaps with an empty text."""
    return verdict.finish != "error" and bool(verdict.completion_tokens or verdict.completion)
