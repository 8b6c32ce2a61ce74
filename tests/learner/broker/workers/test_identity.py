"""A scorer whose endpoint serves another target than the run began with is refused, also after a restart."""

from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.digests import name_digest, scorer_digests
from prefixrl.common.wire.messages.fields import VERSIONS_KEPT
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.learner.broker.workers.identity import IdentityCheck
from support.fakes import run_on_disk


def check_of(config: RunConfig) -> IdentityCheck:
    return IdentityCheck(config, Path(config.directory), None)


def served(config: RunConfig, name: str) -> ModelDigests:
    """The identity that a scorer sends whose endpoint serves the target by this name."""
    loaded = scorer_digests(config, config.model_of("scorer"))
    return msgspec.structs.replace(loaded, model=name_digest(name))


def test_the_first_scorers_name_holds_for_the_run(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, scorer={"engine": "openai", "openai": {"url": "http://a/v1"}})
    check = check_of(config)
    wrong = msgspec.structs.replace(served(config, "x"), tokenizer="other")
    with pytest.raises(ValueError, match="another target: digest of its tokenizer"):
        check.check("scorer", wrong)  # it sets no name
    check.check("scorer", served(config, "a"))
    for later in (check, check_of(config)):
        later.check("scorer", served(config, "a"))
        with pytest.raises(ValueError, match="serves another target"):
            later.check("scorer", served(config, "b"))


def test_a_name_in_the_run_file_holds_from_the_first_scorer_on(tmp_path: Path) -> None:
    openai = {"url": "http://a/v1", "model": "a"}
    config = run_on_disk(tmp_path, scorer={"engine": "openai", "openai": openai})
    with pytest.raises(ValueError, match="serves another target"):
        check_of(config).check("scorer", served(config, "b"))
    check_of(config).check("scorer", served(config, "a"))


def test_digests_of_the_newest_versions_are_known_and_the_others_are_forgotten(
    tmp_path: Path,
) -> None:
    check = check_of(run_on_disk(tmp_path))
    for version in range(VERSIONS_KEPT + 500):
        check.publish(version, f"d{version}")
    assert len(check.digests) == VERSIONS_KEPT
    newest = VERSIONS_KEPT + 499
    check.check_version(newest, f"d{newest}")
    with pytest.raises(ValueError, match=f"never published as version {newest}"):
        check.check_version(newest, "another")
    check.check_version(3, "of a worker that slept for a thousand versions")
    again = check_of(run_on_disk(tmp_path / "again"))
    again.restore(check.digests)
    assert again.digests == check.digests
