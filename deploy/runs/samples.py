"""`prefixrl samples`: the texts of a run, with their verdicts and advantages."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby, islice, takewhile
from pathlib import Path
from typing import Any

import click
import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.hub import cached_file
from prefixrl.common.host.process import stop_event
from prefixrl.common.run.directory_format import check_holds_run
from prefixrl.common.run.tracker import SampleText
from prefixrl.common.wire.messages.fields import common_fields
from prefixrl.common.wire.messages.groups import UNJUDGED
from prefixrl.common.wire.packing import pack_tokens, token_ids
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.runs.inspect import TrainedGroup, newest_groups, trained_groups

Decode = Callable[[list[int]], str]
"""The way from tokens to text."""
COMMONEST = 5
TRENDS = 8
FOLLOW_S = 2.0
TEXT_COLUMN = 14
SAMPLES = 8
"""Samples of a kind on a page."""
LEAST_SHARE = 0.01
"""Texts that are rarer are no part of a page's commonest ones."""


class Common(msgspec.Struct, frozen=True):
    """A text that many rows of a span of iterations have."""

    first: int
    last: int
    """The span, both ends included."""
    text: str
    share: float
    reward: float
    """Mean reward of those rows."""


class ShownSamples(msgspec.Struct, frozen=True):
    """The samples on a page."""

    groups: list[tuple[str, list[SampleText]]] = []
    """By kind."""
    common: list[Common] = []
    fault: str = ""
    """Why there are no samples."""


@click.command("samples")
@run_directory_argument
@click.option(
    "--iteration", type=click.IntRange(0), help="Of which iteration.  [default: the newest]"
)
@click.option("--best", "order", flag_value="best", help="Highest advantages first.")
@click.option("--worst", "order", flag_value="worst", help="Lowest advantages first.")
@click.option(
    "--count", type=click.IntRange(1), default=8, show_default=True, help="Most samples to print."
)
@click.option(
    "--follow", "follows", is_flag=True, help="A sample of every group, as iterations are trained."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per sample.")
def samples_command(
    run_directory: Path,
    iteration: int | None,
    order: str | None,
    count: int,
    follows: bool,
    as_json: bool,
) -> None:
    """Print what the adapter writes: its commonest texts over time, and samples."""
    if follows:
        lines = follow(run_directory, as_json, stop_event().is_set)
    else:
        lines = samples(run_directory, iteration, order, count, as_json)
    for line in lines:
        click.echo(printable(line))


def samples(
    directory: Path, iteration: int | None, order: str | None, count: int, as_json: bool
) -> Iterator[str]:
    """Yield lines for people or programs; raise ConfigError or DataError.

    `iteration`: None for the newest. `order`: None for that of training, best or worst.
    """
    check_holds_run(directory)
    decode = decoder(directory)
    newest = newest_groups(directory)
    if not newest:
        command = to_copy("prefixrl status", directory)
        raise ConfigError(f"{directory}: nothing is trained yet; {command} tells what it waits for")
    last = newest[0].version_trained
    number = last if iteration is None else iteration
    if not 0 <= number <= last:
        raise ConfigError(f"--iteration {number}: trained are 0 to {last}")
    # The newest iteration was read already; an older one is looked up in the journal.
    groups = newest if number == last else trained_groups(directory, number)
    of_it = takewhile(lambda group: group.version_trained == number, groups)
    texts = [text for group in of_it for text in texts_of(group, decode)]
    if order:
        texts.sort(key=lambda each: each.advantage or 0.0, reverse=order == "best")
    if as_json:
        yield from (msgspec.json.encode(each).decode() for each in texts[:count])
        return
    yield from _trend(commonest(trained_groups(directory), last, decode))
    yield ""
    different = {(each.group, each.prefix, each.completion): each for each in texts}
    for sample in islice(different.values(), count):
        yield from lines_of(sample)


def follow(directory: Path, as_json: bool, stopped: Callable[[], bool]) -> Iterator[str]:
    """Yield the samples of each iteration as it is trained, until stopped."""
    check_holds_run(directory)
    decode = decoder(directory)
    last = -1
    while not stopped():
        newest = last
        for group in trained_groups(directory, last + 1):
            newest = max(newest, group.version_trained)
            for sample in texts_of(group, decode)[:1]:
                yield from [msgspec.json.encode(sample).decode()] if as_json else lines_of(sample)
        last = newest
        time.sleep(FOLLOW_S)


def texts_of(group: TrainedGroup, decode: Decode) -> list[SampleText]:
    """Return the rows of a group as text."""
    texts = []
    for row in group.rows:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in row.parts.items())
        fields = {
            "iteration": group.version_trained,
            "group": group.seq,
            "prefix": decode(row.prefix_ids),
            "parts": parts,
        }
        texts.append(SampleText(**common_fields(SampleText, group, row) | fields))
    return texts


def shown_samples(
    newest: Iterable[TrainedGroup],
    decode: Decode,
    common: Iterable[Common],
    early: Iterable[TrainedGroup] = (),
) -> ShownSamples:
    """Choose what a page shows of an iteration's groups: a row per group, and its best and worst, each text once."""
    rows = [texts_of(group, decode) for group in newest]
    firsts = [texts_of(group, decode)[:1] for group in early]
    ranked = sorted(chain(*rows), key=lambda row: row.advantage or 0.0)
    kinds = {
        "Newest": chain(*(texts[:1] for texts in rows)),
        "Best": {(row.group, row.prefix): row for row in reversed(ranked)}.values(),
        "Worst": {(row.group, row.prefix): row for row in ranked}.values(),
        "Early": chain(*firsts),
    }
    groups = [(name, list(islice(samples, SAMPLES))) for name, samples in kinds.items()]
    fault = "" if ranked else "no samples: nothing is trained yet"
    return ShownSamples(groups, [each for each in common if each.share >= LEAST_SHARE], fault)


def commonest(groups: Iterable[TrainedGroup], last: int, decode: Decode) -> list[Common]:
    """Return the commonest texts of each of a few spans of iterations, the newest span last."""
    width = -(-(last + 1) // TRENDS)
    commonest_texts: list[Common] = []
    for span, span_groups in groupby(
        groups, key=lambda group: min(group.version_trained, last) // width
    ):
        counts = Counter[bytes]()
        rewards = defaultdict[bytes, float](float)
        for row in (row for group in span_groups for row in group.rows):
            tokens = pack_tokens(row.prefix_ids)
            counts[tokens] += 1
            rewards[tokens] += row.reward
        ends = span * width, min(last, (span + 1) * width - 1)
        for tokens, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[
            :COMMONEST
        ]:
            text = decode(token_ids(tokens).tolist())
            share = count / counts.total()
            commonest_texts.append(Common(*ends, text, share, rewards[tokens] / count))
    return commonest_texts


def _trend(texts: list[Common]) -> Iterator[str]:
    yield "commonest texts of the adapter (share of rows, their mean reward)"
    for index, common in enumerate(texts):
        is_new = index == 0 or texts[index - 1].first != common.first
        span = f"{common.first}-{common.last}" if common.last > common.first else str(common.first)
        head = f"iteration {span}" if is_new else ""
        yield f"  {head:>20}  {common.share:6.1%}  {common.reward:5.3f}  {common.text!r:.100}"


def lines_of(sample: SampleText) -> Iterator[str]:
    """Yield one sample for a person."""
    unknown = "left out" if sample.status in UNJUDGED else "not yet known"
    advantage = unknown if sample.advantage is None else f"{sample.advantage:+.3f}"
    rule = f" by {sample.rule}" if sample.rule else ""
    yield (
        f"iteration {sample.iteration}, group {sample.group}, {sample.prompt_id}: reward "
        f"{sample.reward:.3g} ({sample.parts or sample.status}{rule}), advantage {advantage}"
    )
    parts = {
        "question": sample.question,
        "draft": sample.draft,
        "prefix": sample.prefix,
        "completion": sample.completion,
    }
    for name, text in parts.items():
        if text:
            yield f"  {name:>{TEXT_COLUMN - 4}}: {_indented(text)}"
    answer = f"   found: {_indented(sample.extracted or 'nothing')}"
    # A reward function of the user's own extracts no answer.
    is_looked_for = sample.extracted or sample.status == "no_answer"
    yield f"  {'gold':>{TEXT_COLUMN - 4}}: {_indented(sample.gold)}{answer if is_looked_for else ''}"
    yield ""


def _indented(text: str) -> str:
    """Return a text with its further lines below its first, so that none poses as another."""
    return text.replace("\n", f"\n{' ' * TEXT_COLUMN}")


def decoder(directory: Path) -> Decode:
    """Return the adapter's way from tokens to text; raise DataError without one."""
    config: dict[str, Any] = read_json(directory / "config.json", dict[str, Any])
    model = str(config["adapter"]["model"])
    if config["rollout"]["engine"] == "simulated":
        return lambda ids: bytes(each for each in ids if 0 < each < 256).decode(errors="replace")
    path = cached_file(model, "tokenizer.json")
    if path is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        return _shows_every_id(tokenizer, partial(tokenizer.decode, skip_special_tokens=False))
    # Late: seconds of imports, which few tokenizers need.
    from prefixrl.common.prompts.tokenizer import load_tokenizer

    slow = load_tokenizer(model)
    return _shows_every_id(slow, slow.decode)


def _shows_every_id(tokenizer: Any, decode: Decode) -> Decode:
    """Return a way from tokens to text that gives ids without a token, which decode to nothing, as `<id 64>`."""
    vocabulary = frozenset(tokenizer.get_vocab().values())

    def text(ids: list[int]) -> str:
        runs = groupby(ids, key=vocabulary.__contains__)
        return "".join(
            decode([*run]) if is_known else "".join(f"<id {each}>" for each in run)
            for is_known, run in runs
        )

    return text
