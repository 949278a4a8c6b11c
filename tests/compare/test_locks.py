"""Locks of pieces of work in a folder that several processes share."""

import os
from pathlib import Path

from subquad.compare.locks import try_lock


def test_a_lock_is_one_process_s_until_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "eva-1"
    with try_lock(path) as first:
        with try_lock(path) as second:
            assert (first, second) == (True, False)
        assert path.exists()
        long_ago = path.stat().st_mtime - 1000
        os.utime(path, (long_ago, long_ago))
        with try_lock(path) as third:
            assert third
            with try_lock(path) as fourth:
                assert not fourth
            later = path.stat().st_mtime + 1000
            os.utime(path, (later, later))
            with try_lock(path) as fifth:
                assert fifth, "nobody touches it: the clock was set back after its owner was gone"
    assert list(path.parent.iterdir()) == []
