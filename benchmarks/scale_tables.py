"""Tables of docs/scale.md: large systems by the model that `benchmarks/scale_model.py` checks, and what they assume.

    python -m benchmarks.scale_tables                              half an hour; writes the tables into docs/scale.md
    python -m benchmarks.scale_tables --checked                    writes the one of measured runs alone
    python -m benchmarks.scale_tables --engines 64 --target 7B     prints some rows

The published recipe's batch, 512 groups of 8 rows and prefixes of 32 tokens, and one that grows with the engines. What
is measured comes from benchmarks/results, the rest are assumptions: the constants of this file."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from benchmarks.capacity.outlook import foresee, limit_of
from benchmarks.capacity.system import BrokerCosts, Part, RowTimes, System, WeightsPath, Workers
from benchmarks.results import ROOT
from benchmarks.seats_arm import LIMIT, MEDIAN, SIGMA
from prefixrl.learner.broker.server import GATHER_S, MESSAGES

PAGE = ROOT / "docs/scale.md"
BEGIN, END = "<!-- table: python -m benchmarks.scale_tables -->\n", "<!-- end of the table -->\n"
CHECKED = "<!-- table: python -m benchmarks.scale_tables --checked -->\n"
GROUPS, ROWS, PREFIX_TOKENS, PROMPT_TOKENS = 512, 8, 32, 200
SIMULATED_SEEDS = 2
MEAN_TOKENS = 550
"""Mean length of completions: lognormal up to a limit, as in `benchmarks/seats.py`."""
ENGINES = (8, 64, 512)
GROUPS_PER_ENGINE, STALENESS, OTHER_STALENESS = 64, 2, (1, 4)
MEASURED_WORKERS = {8: "3", 64: "200", 512: "1000"}
"""Fleet of benchmarks/broker_load.py whose costs are taken, by number of engines."""
PARAMETERS, BYTES = 1.54e9, 2
SIMULATED_ROWS = 8192
SHARES: tuple[Part, ...] = ("scorer", "learner", "broker", "weights")
SPARE_ROLLOUTS = 1.5
ROLLOUTS_PER_HOST = 8


@dataclass(frozen=True)
class Target:
    """Assumed speed of one engine."""

    name: str
    device: str
    tokens_per_s: float
    seats: int


TARGETS = (
    Target("7B", "one GPU of 80 GB", 10_000.0, 256),
    Target("72B", "four GPUs of 80 GB, tensor parallel", 4_000.0, 256),
)
ROLLOUT_TOKENS_PER_S, ROLLOUT_SEATS = 20_000.0, 256
LEARNER_TFLOPS = 400.0
AS_MEASURED = "10 or 100 GbE"
LINKS = {AS_MEASURED: math.inf, "100 GbE, link alone": 12.5e9}
"""Server's bytes/s: as measured with encryption where that is slower; and what the link would carry."""


def measured(name: str, figure: str) -> float:
    """Return a committed figure of another benchmark."""
    report = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    found: float = next(each["value"] for each in report["figures"] if each["name"] == figure)
    return found


def broker_costs(workers: str) -> BrokerCosts:
    """Return the costs of a group and of a turn that both measured loads follow from.

    Saturated, a turn handles `MESSAGES`, two for each group. At 200 groups/s it handles what comes from the first
    message until `GATHER_S` later, and then its own work follows.
    """
    offered = f"{workers} workers, 200 groups/s offered"
    rate = measured("broker_load", f"{offered}: groups per second")
    spent = rate * measured("broker_load", f"{offered}: CPU per group") / 1000
    saturated_s = measured("broker_load", f"{workers} workers, saturated: CPU per group") / 1000
    turn_s = 0.0
    for _ in range(50):
        turns = 1 / (1 / (2 * rate) + GATHER_S + turn_s)
        turn_s = (spent - rate * saturated_s) / (turns - 2 * rate / MESSAGES)
    return BrokerCosts(group_s=saturated_s - 2 * turn_s / MESSAGES, turn_s=turn_s)


def training_s(groups: int, ranks: int) -> float:
    """Return the time of an iteration in training: 2 operations per parameter, token and forward-equivalent."""
    # Forwards of proximal policy, reference and critic; actor and critic learn, each a forward and a backward of two.
    forwards = 3 + 2 * 3
    tokens = groups * (PROMPT_TOKENS + ROWS * PREFIX_TOKENS)
    return 2.0 * PARAMETERS * tokens * forwards / (LEARNER_TFLOPS * 1e12 * ranks)


def system(
    target: Target,
    engines: int,
    link: str,
    groups: int,
    staleness: int,
    rollouts_per_host: int = ROLLOUTS_PER_HOST,
) -> System:
    """Return a system of so many engines, and a learner of one rank for eight of them."""
    token_s = target.seats / target.tokens_per_s
    rows_per_s = engines * target.tokens_per_s / MEAN_TOKENS
    rollouts = math.ceil(SPARE_ROLLOUTS * rows_per_s * PREFIX_TOKENS / ROLLOUT_TOKENS_PER_S)
    prefix_token_s = ROLLOUT_SEATS / ROLLOUT_TOKENS_PER_S
    completion = RowTimes(
        mean_s=MEDIAN * math.exp(SIGMA**2 / 2) * token_s, sigma=SIGMA, limit_s=LIMIT * token_s
    )
    server = (
        LINKS[link]
        if math.isfinite(LINKS[link])
        else 1e9 * measured("weight_transfer", "encrypted, 1")
    )
    return System(
        batch_groups=groups,
        rows_per_group=ROWS,
        max_staleness=staleness,
        rollouts=Workers(
            count=rollouts,
            seats=ROLLOUT_SEATS,
            row=RowTimes(mean_s=PREFIX_TOKENS * prefix_token_s),
            look_s=prefix_token_s,
        ),
        scorers=Workers(count=engines, seats=target.seats, row=completion, look_s=token_s),
        learner_s=training_s(groups, engines // 8),
        publish_s=PARAMETERS
        * BYTES
        / 2**30
        * measured("publication", "main thread's time of a publication"),
        weights=WeightsPath(
            pulled_bytes=PARAMETERS * BYTES,
            hosts=math.ceil(rollouts / rollouts_per_host),
            server_bytes_per_s=server,
        ),
        broker=broker_costs(MEASURED_WORKERS[engines]),
    )


def row_of(
    target: Target,
    engines: int,
    groups: int,
    link: str = AS_MEASURED,
    staleness: int = STALENESS,
    rollouts_per_host: int = ROLLOUTS_PER_HOST,
) -> str:
    """Return a line of the table."""
    full = system(target, engines, link, groups, staleness, rollouts_per_host)
    coarse = full.coarser(SIMULATED_ROWS)
    found = foresee(coarse, SIMULATED_SEEDS)
    limit, busy = limit_of(coarse, found), found.busy
    rate = groups / found.iteration_s
    cells = [
        *(f"{engines} x {target.name}", link, f"{groups:,}", str(staleness)),
        *(
            f"{full.rollouts.count} on {full.weights.hosts}",
            f"{rate:,.1f}",
            f"{found.iteration_s:.0f}",
        ),
        *(f"{found.mean_age:.2f}", *(f"{busy[part]:.2f}" for part in SHARES), limit),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| engines | link | groups per iteration | S | rollouts on hosts | groups/s | iteration, s | mean age "
    "| scorers busy | learner busy | broker busy | link busy | limit |"
)


def table(engines: Sequence[int] = ENGINES, targets: Sequence[Target] = TARGETS) -> Iterator[str]:
    """Yield the lines of the table, as they are found."""
    yield HEAD
    yield "|" + HEAD.count(" |") * "---|"
    for target in targets:
        for number in engines:
            for groups in sorted({GROUPS, number * GROUPS_PER_ENGINE}):
                yield from (row_of(target, number, groups, link) for link in LINKS)
                yield from (
                    row_of(target, number, groups, staleness=each) for each in OTHER_STALENESS
                )
            if number == max(ENGINES):
                yield from (
                    row_of(target, number, groups, link, rollouts_per_host=1) for link in LINKS
                )


def checked() -> Iterator[str]:
    """Yield the lines of the table of measured runs, each figure beside the model's."""
    report = json.loads((ROOT / "benchmarks/results/scale_model.json").read_text(encoding="utf-8"))
    cases: dict[str, list[str]] = {}
    names = dict[str, None]()
    for each in report["figures"]:
        case, _, name = each["name"].rpartition(": ")
        names[name] = None
        digits = 1 if name == "throughput" else 3 if name == "broker busy" else 2
        cell = f"{each['value']:.{digits}f} / {each['baseline']:.{digits}f}"
        cases.setdefault(case, []).append(
            cell + (f" ({each['ratio']:.2f})" if name == "throughput" else "")
        )
    yield f"| measured / model | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for case, cells in cases.items():
        yield f"| {case} | {' | '.join(cells)} |"


def put(begin: str, lines: Sequence[str]) -> None:
    """Write a table into the page, between its marks."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    assert mark, f"{PAGE} has no line {begin!r}"
    after = rest.partition(END)[2]
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


@click.command()
@click.option(
    "--checked", "only_checked", is_flag=True, help="Write the table of measured runs alone."
)
@click.option(
    "--engines",
    type=click.Choice([str(each) for each in ENGINES]),
    help="Print the rows of this number.",
)
@click.option(
    "--target",
    type=click.Choice([each.name for each in TARGETS]),
    help="Print the rows of this target.",
)
def main(only_checked: bool, engines: str | None, target: str | None) -> None:
    """Simulate the systems of the table."""
    if only_checked:
        put(CHECKED, list(checked()))
        return
    numbers = [int(engines)] if engines else ENGINES
    lines = []
    for line in table(numbers, [each for each in TARGETS if target in (None, each.name)]):
        print(line, flush=True)
        lines.append(line)
    if engines or target:
        return
    put(CHECKED, list(checked()))
    put(BEGIN, lines)


if __name__ == "__main__":
    main()
