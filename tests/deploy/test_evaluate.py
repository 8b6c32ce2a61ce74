"""`prefixrl eval` before it starts anything."""

from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.deploy.evaluate import _data
from support.tiny_model import run_config, save_model


@pytest.mark.parametrize(("given", "named"), [(("gone",), "--data 'gone'"), (("gsm8k", "gone"), "--data 'gone'")])
def test_problems_that_are_not_there_are_refused_by_the_flag_that_named_them(
    tmp_path: Path, given: tuple[str, ...], named: str
) -> None:
    data = run_config(save_model(tmp_path / "adapter")).data
    with pytest.raises(ConfigError) as refused:
        _data(tmp_path, data, given)
    assert str(refused.value).startswith(f"{named}: there is no such file or folder (looked at {Path.cwd()}/gone)")
