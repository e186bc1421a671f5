"""Output folders appear complete or not at all, and on an object store with their marker last."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from workers.spark.errors import JobError
from workers.spark.folder import OutputFolder


def held(folder: Path) -> set[str]:
    return {
        str(file.relative_to(folder)).partition("/part-")[0] for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("at_once", [True, False])
def test_folder_appears_once_it_is_complete(spark: SparkSession, tmp_path: Path, *, at_once: bool):
    """An object store, which copies file by file, gets the marker last."""
    out = tmp_path / "out"
    with OutputFolder(spark, str(out)) as folder:
        assert folder.renames_at_once
        folder.renames_at_once = at_once
        folder.table("rows", spark.range(3))
        folder.text("_marker.json", "{}")
        assert not out.exists()
        assert ("_marker.json" in held(tmp_path / "_out.making")) is at_once
    assert held(tmp_path) == {"out/rows", "out/_marker.json"}
    assert (out / "_marker.json").read_text() == "{}"


def test_failure_keeps_the_old_folder(spark: SparkSession, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    (tmp_path / "_out.making").mkdir()  # left by a killed job
    (tmp_path / "_out.making" / "half").touch()
    with pytest.raises(JobError, match="exists already; --overwrite replaces it"):
        OutputFolder(spark, str(tmp_path / "out"))
    with pytest.raises(RuntimeError), OutputFolder(spark, str(tmp_path / "out"), overwrite=True) as folder:  # noqa: PT012
        assert held(tmp_path / "_out.making") == set()
        folder.text("new", "")
        raise RuntimeError
    assert held(tmp_path) == {"out/old"}
    with OutputFolder(spark, str(tmp_path / "out"), overwrite=True) as folder:
        folder.text("new", "")
    assert held(tmp_path) == {"out/new"}
