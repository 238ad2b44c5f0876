"""Everything that `gyre train` checks before it starts."""

from pathlib import Path

import gyre


def test_the_configuration_can_be_trained() -> None:
    config = gyre.load_config(Path(__file__).with_name("name_of_it.toml"))
    assert [finding.problem for finding in gyre.check(config) if not finding.ok] == []
