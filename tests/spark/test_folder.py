"""Folders of results: whole under their name or not there, and on an object store with their marker last."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from workers.spark.folder import Folder
from workers.spark.refused import Refused


def held(folder: Path) -> set[str]:
    return {
        str(file.relative_to(folder)).partition("/part-")[0] for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("at_once", [True, False])
def test_it_is_there_once_it_is_whole(spark: SparkSession, tmp_path: Path, *, at_once: bool):
    """A store that copies file by file gets what says that it is whole only then."""
    out = tmp_path / "out"
    with Folder(spark, str(out)) as folder:
        assert folder.renames_at_once
        folder.renames_at_once = at_once
        folder.table("rows", spark.range(3))
        folder.text("_marker.json", "{}")
        assert not out.exists()
        assert ("_marker.json" in held(tmp_path / "_out.making")) is at_once
    assert held(tmp_path) == {"out/rows", "out/_marker.json"}
    assert (out / "_marker.json").read_text() == "{}"


def test_one_that_fails_leaves_what_was_there(spark: SparkSession, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    (tmp_path / "_out.making").mkdir()  # of one that was killed
    (tmp_path / "_out.making" / "half").touch()
    with pytest.raises(Refused, match="is there already; --overwrite replaces it"):
        Folder(spark, str(tmp_path / "out"))
    with pytest.raises(RuntimeError), Folder(spark, str(tmp_path / "out"), overwrite=True) as folder:  # noqa: PT012
        assert held(tmp_path / "_out.making") == set()
        folder.text("new", "")
        raise RuntimeError
    assert held(tmp_path) == {"out/old"}
    with Folder(spark, str(tmp_path / "out"), overwrite=True) as folder:
        folder.text("new", "")
    assert held(tmp_path) == {"out/new"}
