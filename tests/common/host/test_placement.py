"""GPUs are dealt out for every number of them: own ones where there are enough, else rollouts beside the learner."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host import placement

BASE: dict[str, Any] = {
    "directory": "run",
    "adapter": {"model": "adapter"},
    "target": {"model": "target"},
    "data": {"train": "train.jsonl"},
    "algorithm": {"iterations": 1},
    "rollout": {"engine": "vllm"},
    "scorer": {"engine": "vllm"},
}


def config_of(
    launch: dict[str, Any], scorer: dict[str, Any] | None = None, **others: Any
) -> RunConfig:
    return RunConfig.model_validate(
        BASE | {"launch": launch, "scorer": {"engine": "vllm", "vllm": scorer or {}}} | others
    )


@pytest.mark.parametrize(
    ("there", "launch", "scorer", "expected"),
    [
        pytest.param(1, {}, {}, "GPU 0: learner, rollout-0, scorer-0", id="one GPU"),
        pytest.param(2, {}, {}, "GPU 0: learner, rollout-0; GPU 1: scorer-0", id="two GPUs"),
        pytest.param(
            2,
            {"scorers": 2},
            {},
            "GPU 0: learner, rollout-0; GPU 1: scorer-0, scorer-1",
            id="two scorers on two GPUs",
        ),
        pytest.param(
            2,
            {"learner_ranks": 2, "rollouts": 2},
            {},
            "GPU 0: learner, rollout-0, scorer-0; GPU 1: learner, rollout-1",
            id="two ranks and two rollouts",
        ),
        pytest.param(
            8,
            {"scorers": 6},
            {},
            (
                "GPU 0: learner; GPU 1: rollout-0; GPU 2: scorer-0; GPU 3: scorer-1; "
                "GPU 4: scorer-2; GPU 5: scorer-3; GPU 6: scorer-4; GPU 7: scorer-5"
            ),
            id="a GPU for each of eight processes",
        ),
        pytest.param(
            8,
            {"scorers": 7},
            {},
            (
                "GPU 0: learner, rollout-0; GPU 1: scorer-0; GPU 2: scorer-1; GPU 3: scorer-2; "
                "GPU 4: scorer-3; GPU 5: scorer-4; GPU 6: scorer-5; GPU 7: scorer-6"
            ),
            id="a rollout beside the learner",
        ),
        pytest.param(
            8,
            {"scorers": 3},
            {"tensor_parallel_size": 2},
            (
                "GPU 0: learner; GPU 1: rollout-0; GPU 2: scorer-0; GPU 3: scorer-0; "
                "GPU 4: scorer-1; GPU 5: scorer-1; GPU 6: scorer-2; GPU 7: scorer-2"
            ),
            id="engines of two GPUs",
        ),
        pytest.param(
            8,
            {"learner_ranks": 4},
            {"tensor_parallel_size": 4},
            (
                "GPU 0: learner, rollout-0; GPU 1: learner; GPU 2: learner; GPU 3: learner; "
                "GPU 4: scorer-0; GPU 5: scorer-0; GPU 6: scorer-0; GPU 7: scorer-0"
            ),
            id="four ranks and an engine of four GPUs",
        ),
        pytest.param(
            4,
            {},
            {"options": {"pipeline_parallel_size": 2}},
            "GPU 0: learner; GPU 1: rollout-0; GPU 2: scorer-0; GPU 3: scorer-0",
            id="pipeline parallel",
        ),
        pytest.param(
            4,
            {},
            {"options": {"data_parallel_size": 2}},
            "GPU 0: learner; GPU 1: rollout-0; GPU 2: scorer-0; GPU 3: scorer-0",
            id="data parallel",
        ),
        pytest.param(
            8,
            {},
            {
                "tensor_parallel_size": 2,
                "options": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            },
            (
                "GPU 0: learner, rollout-0, scorer-0; GPU 1: scorer-0; GPU 2: scorer-0; "
                "GPU 3: scorer-0; GPU 4: scorer-0; GPU 5: scorer-0; GPU 6: scorer-0; "
                "GPU 7: scorer-0"
            ),
            id="three kinds of parallel at once",
        ),
        pytest.param(
            4,
            {"scorers": 2, "devices": {"learner": [3], "rollout": [3], "scorer": [[0], [1]]}},
            {},
            "GPU 0: scorer-0; GPU 1: scorer-1; GPU 3: learner, rollout-0",
            id="all devices given",
        ),
        pytest.param(
            4,
            {"scorers": 2, "devices": {"scorer": [0, 1]}},
            {},
            "GPU 0: scorer-0; GPU 1: scorer-1; GPU 2: learner; GPU 3: rollout-0",
            id="devices of scorers given",
        ),
        pytest.param(0, {}, {}, "", id="no GPU"),
    ],
)
def test_processes_are_placed_as_a_person_would(
    there: int, launch: dict[str, Any], scorer: dict[str, Any], expected: str
) -> None:
    assert (
        placement.described(
            placement.place(placement.processes_of(config_of(launch, scorer)), there)
        )
        == expected
    )


def test_processes_without_a_model_on_a_gpu_get_none() -> None:
    openai = {"engine": "openai", "openai": {"url": "http://127.0.0.1:1/v1"}}
    served = RunConfig.model_validate(BASE | {"scorer": openai})
    assert placement.place(placement.processes_of(served), 2) == {
        "learner": (0,),
        "rollout-0": (1,),
        "scorer-0": (),
    }
    on_cpu = RunConfig.model_validate(BASE | {"learner": {"device": "cpu"}})
    assert placement.place(placement.processes_of(on_cpu), 2) == {
        "learner": (),
        "rollout-0": (0,),
        "scorer-0": (1,),
    }


@pytest.mark.parametrize(
    ("there", "launch", "scorer", "message"),
    [
        (1, {}, {"tensor_parallel_size": 2}, "scorer-0 needs 2 GPUs and 1 are there"),
        (2, {"learner_ranks": 3}, {}, "learner needs 3 GPUs and 2 are there"),
        (2, {"devices": {"learner": [2]}}, {}, "launch.devices gives learner GPU 2; there are 2"),
    ],
)
def test_what_does_not_exist_is_refused(
    there: int, launch: dict[str, Any], scorer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        placement.place(placement.processes_of(config_of(launch, scorer)), there)


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param({"devices": {"learner": [0, 1]}}, id="two GPUs for one rank"),
        pytest.param({"scorers": 2, "devices": {"scorer": [0]}}, id="one GPU for two scorers"),
        pytest.param({"devices": {"scorer": [[0, 1]]}}, id="two GPUs for an engine of one"),
        pytest.param({"learner_ranks": 2, "devices": {"learner": [1, 1]}}, id="the same GPU twice"),
    ],
)
def test_devices_of_another_number_than_processes_need_are_refused(launch: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"launch.devices.\w+ = .* different GPUs for each of"):
        config_of(launch)


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=4),
    st.lists(st.integers(0, 4), max_size=6),
)
def test_everybody_gets_as_many_different_gpus_as_asked_for_and_guests_alone_sit_with_the_learner_while_there_is_room(
    there: int, ranks: int, rollouts: list[bool], scorers: list[int]
) -> None:
    processes = [
        placement.Process(placement.LEARNER, ranks),
        *(
            placement.Process(f"rollout-{index}", 1, is_guest=is_guest)
            for index, is_guest in enumerate(rollouts)
        ),
        *(placement.Process(f"scorer-{index}", gpus) for index, gpus in enumerate(scorers)),
    ]
    if max(each.gpus for each in processes) > there:
        with pytest.raises(ConfigError):
            placement.place(processes, there)
        return
    placed = placement.place(processes, there)
    for process in processes:
        assert len(set(placed[process.name])) == process.gpus == len(placed[process.name])
        assert set(placed[process.name]) <= set(range(there))
    if sum(each.gpus for each in processes) <= there:
        assert all(len(names) == 1 for names in placement.neighbours(placed).values())
    assert placement.read(placement.written(placed)) == placed


def test_a_process_sees_its_own_gpus_and_the_learner_knows_where_all_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,GPU-7")
    assert placement.gpus_here() == ("4", "6", "GPU-7")
    placed = {"learner": (0,), "rollout-0": (0,), "scorer-0": (1, 2), "scorer-1": ()}
    assert placement.visible(placed, placement.gpus_here(), "learner") == {
        "CUDA_VISIBLE_DEVICES": "4",
        placement.VARIABLE: "learner=0;rollout-0=0;scorer-0=1,2;scorer-1=",
    }
    assert placement.visible(placed, placement.gpus_here(), "scorer-0") == {
        "CUDA_VISIBLE_DEVICES": "6,GPU-7"
    }
    assert placement.visible(placed, placement.gpus_here(), "scorer-1") == {
        "CUDA_VISIBLE_DEVICES": ""
    }
    assert placement.visible({}, (), "learner") == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.gpus_here() == ()
    with pytest.raises(ConfigError, match="placement 'x': must be"):
        placement.read("x")


@pytest.mark.parametrize(
    ("tool", "folders", "found"),
    [
        pytest.param(
            "echo 'GPU 0: H100 (UUID: GPU-a)'; echo '  MIG 1g.10gb Device 0:'; echo 'GPU 1: H100'",
            8,
            ("0", "1"),
            id="two GPUs and a slice",
        ),
        pytest.param(
            "echo 'NVIDIA-SMI has failed, no GPU 0: driver'; exit 9",
            1,
            ("0",),
            id="nvidia-smi fails and torch's refusal names it",
        ),
        pytest.param("echo 'No devices found'", 0, (), id="nvidia-smi finds none"),
        pytest.param("", 2, ("0", "1"), id="folders of the driver alone"),
        pytest.param("", 0, (), id="nothing"),
    ],
)
def test_gpus_are_those_that_the_driver_lists_or_else_shows(
    tool: str, folders: int, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(placement, "GPUS", tmp_path / "gpus")
    for index in range(folders):
        (tmp_path / f"gpus/0000:{index:02}:00.0").mkdir(parents=True)
    if tool:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert placement.gpus_here() == found
