"""Host ids of sandboxes: nobody else's, and never root's."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import ConfigError
from gyre.sandboxes.isolation.ids import AGENT, COUNT, FIRST, GRADER, LEAST, IdRange, choose, of_this_machine

WHOLE = [IdRange(0, (1 << 32) - 1)]
ranges = st.builds(IdRange, st.integers(0, FIRST + 10 * COUNT), st.integers(1, 4 * COUNT))


@given(used=st.lists(ranges, max_size=8), mapped=st.lists(ranges, min_size=1, max_size=4))
def test_the_range_is_mapped_and_nobody_elses(used: list[IdRange], mapped: list[IdRange]) -> None:
    try:
        chosen = choose(used, mapped)
    except ConfigError:
        return
    assert not any(chosen.overlaps(other) for other in used)
    assert any(have.first <= chosen.first and chosen.first + chosen.count <= have.first + have.count for have in mapped)
    assert LEAST <= chosen.count <= COUNT


@given(used=st.lists(ranges, max_size=8))
def test_a_machine_of_its_own_always_has_a_whole_range(used: list[IdRange]) -> None:
    chosen = choose(used, WHOLE)
    assert chosen.count == COUNT
    assert chosen.first >= FIRST


def test_a_configured_range_that_somebody_has_is_refused() -> None:
    assert choose([IdRange(100_000)], WHOLE, 200_000) == IdRange(200_000)
    with pytest.raises(ConfigError, match=r"first_id = 150000: this machine uses the ids from 100000 on"):
        choose([IdRange(100_000)], WHOLE, 150_000)
    with pytest.raises(ConfigError, match="not mapped"):
        choose([], [IdRange(0, 65_536)], 150_000)


def test_users_groups_and_subordinate_ranges_of_the_machine_are_kept_clear_of(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    for name in ("uid_map", "gid_map"):
        (tmp_path / "proc/self" / name).write_text("         0          0 4294967295\n")
    (tmp_path / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\nodd:x:{FIRST}:1::/:/bin/sh\nbroken\n")
    (tmp_path / "etc/group").write_text(f"odd:x:{FIRST + COUNT}:\n")
    (tmp_path / "etc/subuid").write_text(f"odd:{FIRST + 2 * COUNT}:65536\n")
    chosen = of_this_machine(root=tmp_path)
    for taken in (0, FIRST, FIRST + COUNT, FIRST + 3 * COUNT - 1):
        assert not chosen.first <= taken < chosen.first + chosen.count


def test_a_container_with_few_ids_gives_what_it_has() -> None:
    chosen = choose([IdRange(0, 1000)], [IdRange(0, 65_536)])
    assert chosen == IdRange(1000, 64_536)
    assert chosen.host(GRADER) == 1000 + GRADER
    with pytest.raises(ConfigError, match="larger range"):
        choose([IdRange(0, 1)], [IdRange(0, 1000)])
    with pytest.raises(ValueError, match="outside"):
        IdRange(5, 10).host(AGENT)
