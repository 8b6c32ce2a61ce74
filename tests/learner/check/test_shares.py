"""A GPU that several processes are on is divided so that all fit, or the run is refused with the shares."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import VARIABLE, place, processes_of
from prefixrl.learner.__main__ import _placed, main
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import GIB
from prefixrl.learner.check.shares import Demand, demands, divide, with_shares
from support.models.recipes import recipe, settings_of
from support.paths import EXAMPLES

OPEN = {"learner": Demand(0.5, 0.5), "rollout": Demand(0.101, None), "scorer": Demand(0.2, None)}


def test_alone_on_its_gpu_an_engine_keeps_vllms_own_share() -> None:
    actual = divide({"learner": (0,), "rollout-0": (1,), "scorer-0": (2,)}, OPEN)
    assert actual.chosen == {}
    assert actual.lines == ["GPU 0: learner 0.50", "GPU 1: rollout-0 0.92", "GPU 2: scorer-0 0.92"]


def test_beside_the_learner_a_rollout_gets_what_it_needs_and_scorers_divide_the_rest() -> None:
    actual = divide({"learner": (0,), "rollout-0": (0,), "scorer-0": (1,)}, OPEN)
    assert actual.chosen == {"rollout": 0.11}
    crowded = divide({"learner": (0,), "rollout-0": (0,), "scorer-0": (0,)}, OPEN)
    assert crowded.chosen == {"rollout": 0.11, "scorer": pytest.approx(1 - 0.02 - 0.5 - 0.11)}
    two = divide({"learner": (0,), "scorer-0": (1,), "scorer-1": (1,), "scorer-2": (0,)}, OPEN)
    assert two.chosen == {"scorer": 0.48}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scorer": Demand(0.4, None)},
            "GPU 0 has not enough memory for 3 processes .*scorer-0 at least 0.40; start",
        ),
        ({"scorer": Demand(0.2, 0.9)}, "learner 0.50, rollout-0 0.11, scorer-0 0.90; start"),
        ({"learner": Demand(0.95, 0.95)}, "learner 0.95, rollout-0 0.11"),
        (
            {"learner": Demand(0.6, 0.6), "scorer": Demand(0.28, 0.28)},
            "3 processes and 0.02 left free, .*learner 0.60",
        ),
    ],
)
def test_a_gpu_that_is_asked_for_more_than_it_has_is_refused(
    changes: dict[str, Demand], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divide({"learner": (0,), "rollout-0": (0,), "scorer-0": (0,)}, OPEN | changes)


shares = st.floats(0.01, 0.99)


@given(
    st.tuples(shares, shares, shares),
    st.booleans(),
    st.none() | shares,
    st.just(0.0) | shares,
    st.tuples(*[st.integers(1, 4)] * 3),
    st.integers(1, 2),
)
def test_no_gpu_is_ever_asked_for_more_than_it_has(
    least: tuple[float, float, float],
    is_rollout_open: bool,
    given_share: float | None,
    beside: float,
    counts: tuple[int, int, int],
    each: int,
) -> None:
    rollouts, scorers, gpus = counts
    demanded = {
        "learner": Demand(least[0], least[0]),
        "rollout": Demand(least[1], None if is_rollout_open else least[1]),
        "scorer": Demand(min(least[2], given_share or 1.0), given_share, beside),
    }
    placed = {
        name: (index % gpus,)
        for index, name in enumerate(["learner", *(f"rollout-{n}" for n in range(rollouts))])
    }
    placed |= {
        f"scorer-{n}": tuple((n + k) % gpus for k in range(min(each, gpus))) for n in range(scorers)
    }
    try:
        chosen = divide(placed, demanded).chosen
    except ConfigError:
        return
    for gpu in range(gpus):
        roles = [name.split("-")[0] for name, own in placed.items() if gpu in own]
        taken = [chosen.get(role, demanded[role].share or budget.WHOLE) for role in roles]
        taken += [
            beside
            for name, own in placed.items()
            if name.startswith("scorer") and own[0] == gpu and beside
        ]
        assert sum(taken) <= 1.0 - budget.FREE + 1e-9 or len(taken) == 1
        assert (
            all(chosen.get(role, 1.0) >= demanded[role].least for role in roles) or len(taken) == 1
        )


def test_the_recipe_on_eight_gpus_has_its_rollout_beside_the_learner(tmp_path: Path) -> None:
    config = recipe("math_qwen2.5", tmp_path)
    actual, lines = with_shares(config, place(processes_of(config), 8), 110)
    assert lines[0].startswith("GPU 0: learner 0.8"), lines
    share = actual.rollout.vllm.gpu_memory_utilization
    assert share is not None and actual.rollout.vllm.kv_cache_memory_bytes == 4 * GIB
    assert with_shares(config, place(processes_of(config), 9), 110)[0] == config
    given = recipe("math_qwen2.5", tmp_path, "rollout.vllm.kv_cache_memory_bytes=1073741824")
    smaller = with_shares(given, place(processes_of(given), 8), 110)[0].rollout.vllm
    assert smaller.kv_cache_memory_bytes == GIB and (smaller.gpu_memory_utilization or 1) < share
    large = recipe("math_qwen2.5", tmp_path, "learner.micro_batch_tokens=4096")
    with pytest.raises(ConfigError, match=r"learner 0.87, rollout-0 0.14"):
        with_shares(large, place(processes_of(large), 8), 110)
    needed = demands(config, 79 * GIB, 110)["rollout"].least
    assert needed <= share < needed + 0.01
    assert actual.scorer.vllm.gpu_memory_utilization is None
    assert len(lines) == 8 and lines[1] == "GPU 1: scorer-0 0.92"


def checked(monkeypatch: pytest.MonkeyPatch, folder: Path, there: str) -> Result:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    flags = [part for each in settings_of(folder) for part in ("--set", each)]
    return CliRunner().invoke(
        main, [str(EXAMPLES / "math_qwen2.5" / "run.toml"), *flags, "--check"]
    )


def test_the_check_tells_who_is_where_and_refuses_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = checked(monkeypatch, tmp_path, "0,1,2,3,4,5,6,7")
    assert eight.exit_code == 0 and "\nGPU 7: scorer-6 0.92\n" in eight.output
    one = checked(monkeypatch, tmp_path, "0")
    assert one.exit_code == 2 and "GPU 0 has not enough memory for 9 processes" in one.output
    assert "\nGPU" not in checked(monkeypatch, tmp_path, "").output


def test_a_learner_that_shares_its_gpu_tells_engines_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe("math_qwen2.5", tmp_path)
    monkeypatch.setenv(VARIABLE, "learner=0;rollout-0=0;scorer-0=1")
    assert _placed(config).rollout.vllm.gpu_memory_utilization is not None
    monkeypatch.setenv(VARIABLE, "learner=0;rollout-0=1;scorer-0=2")
    assert _placed(config) == config
    monkeypatch.setenv(VARIABLE, "learner=0;rollout-0=0;scorer-0=0")
    with pytest.raises(ConfigError, match="GPU 0 has not enough memory for 3 processes"):
        _placed(config)
