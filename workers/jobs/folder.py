"""A job's output folder, on any filesystem of pyarrow: written under another name, renamed once complete.

Object stores cannot rename a folder at once, they copy file by file. There the text files are written last:
one of them marks the folder as complete.

Of several runs with one folder one goes on. It holds a claim, a file that it writes again every second;
another run that sees the claim change stops. A claim that stays the same was left by a run that was killed.
The files of each run are in a folder of its own, so a run that lost its claim disturbs no other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from app.storage_location import InvalidLocationError, StorageLocation
from workers.jobs.errors import JobError

RENAMES_AT_ONCE: Final = frozenset({"local", "hdfs"})
ROWS_OF_A_GROUP: Final = 65_536
CLAIM: Final = "claim"
CLAIMED_EVERY_S: Final = 1.0
ABANDONED_S: Final = 10.0
"""The age from which an unchanged claim was left by a killed run; a busy run renews its claim earlier."""

SETTLED_S: Final = 0.2
"""How long a run waits before it looks whether its claim is still its own: two may have begun together."""


class OutputFolder:
    """A context for writing a folder, which gets its name on success, and is removed on failure.

    Args:
        overwrite: replace a folder of this name; without it, an existing folder is an error.

    Attributes:
        renames_at_once: whether the filesystem renames a folder in one step.

    Raises:
        JobError: the folder exists already, or the place cannot be reached.
    """

    def __init__(self, url: str, *, overwrite: bool = False) -> None:
        try:
            location = StorageLocation(url)
        except InvalidLocationError as error:
            raise JobError(f"{url.partition(':')[0]}://...: {error}") from None
        self.name, self._redact = location.name, location.redact
        try:
            self._files, self._target = location.open()
            there = self._files.get_file_info(self._target).type
        except (InvalidLocationError, OSError, pa.ArrowException) as error:
            raise JobError(f"{self.name}: {self._redact(error)}") from None
        if there == fs.FileType.File:
            raise JobError(f"{self.name}: is a file, must be a folder")
        self.renames_at_once = self._files.type_name in RENAMES_AT_ONCE
        self._overwrite = overwrite
        self._claim, self._done = uuid4().hex, threading.Event()
        self._writing_claim = threading.Lock()  # a claim that is just being written is empty for a moment
        self._temporary = self._beside(f"{self._claim}.making")
        self._texts: dict[str, str] = {}
        if there != fs.FileType.NotFound and not overwrite:
            raise self._exists()

    def __enter__(self) -> Self:
        with self._blaming("cannot be written"):
            try:
                self._take_over()
            except BaseException:  # Ctrl-C too
                self._give_up()
                raise
        self._keeper = threading.Thread(target=self._keep_claim, name="claim", daemon=True)
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._blaming("cannot be created"):
                    self._complete()
        finally:
            self._done.set()
            self._keeper.join()
            self._give_up()

    def _give_up(self) -> None:
        """Remove the files of this run and its claim; an error here would hide the first one."""
        with suppress(OSError, pa.ArrowException):
            self._clear(self._claim)
            if self._is_ours():
                self._files.delete_file(self._beside(CLAIM))

    def table(self, name: str, rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        """Write a table as Parquet, batch by batch.

        Raises:
            JobError: it cannot be written.
        """
        with self._blaming("cannot be written"):
            self._files.create_dir(f"{self._temporary}/{name}")
            path = f"{self._temporary}/{name}/part-0.parquet"
            with pq.ParquetWriter(path, schema, filesystem=self._files, compression="zstd") as writer:
                for batch in rows:
                    writer.write_batch(batch, ROWS_OF_A_GROUP)

    def text(self, name: str, text: str) -> None:
        """Write a text file.

        Raises:
            JobError: it cannot be written.
        """
        if self.renames_at_once:
            with self._blaming("cannot be written"):
                self._write(f"{self._temporary}/{name}", text.encode())
        else:
            self._texts[name] = text

    @contextmanager
    def _blaming(self, why: str) -> Iterator[None]:
        """Turn an error of the filesystem into a JobError that names the folder."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{self.name}: {why}: {self._redact(error)}") from None

    def _beside(self, end: str) -> str:
        """A path next to the folder, which readers leave out."""
        above, _, name = self._target.rpartition("/")
        return f"{above}/_{name}.{end}"

    def _take_over(self) -> None:
        """Claim the folder, unless another run holds it.

        Raises:
            JobError: another run is writing the folder now, or has written it meanwhile.
        """
        if (held := self._held()) is not None:
            waits = f"waiting up to {ABANDONED_S:g} s for another run, which may have been killed"
            print(f"{self.name}: {waits}", file=sys.stderr)  # noqa: T201  nothing else is shown meanwhile
            until = time.monotonic() + ABANDONED_S
            while (now := self._held()) is not None:
                if now != held:
                    raise self._taken()
                if time.monotonic() >= until:
                    break
                time.sleep(CLAIMED_EVERY_S / 4)
        if self.renames_at_once:
            self._files.create_dir(self._target.rpartition("/")[0])
        self._write_claim(0)
        time.sleep(SETTLED_S)
        if not self._is_ours():
            raise self._taken()
        if self._is_there(self._target) and not self._overwrite:  # the other run has ended well
            raise self._exists()
        if held is not None:
            self._clear(held.partition(b" ")[0].decode(errors="replace"))
        self._files.create_dir(self._temporary)

    def _held(self) -> bytes | None:
        """The claim on the folder; None if it has no claim."""
        try:
            with self._files.open_input_stream(self._beside(CLAIM)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def _taken(self) -> JobError:
        return JobError(f"{self.name}: another run is writing it now; give this one another --out")

    def _exists(self) -> JobError:
        return JobError(f"{self.name}: exists already; --overwrite replaces it")

    def _is_there(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type != fs.FileType.NotFound)

    def _clear(self, claim: str) -> None:
        """Remove the files of the run with this claim."""
        if self._is_there(being_written := self._beside(claim)):
            self._files.delete_file(being_written)
        if self._is_there(made := self._beside(f"{claim}.making")):
            self._files.delete_dir(made)

    def _is_ours(self) -> bool:
        with self._writing_claim:
            return (self._held() or b"").startswith(self._claim.encode())

    def _write_claim(self, number: int) -> None:
        content = f"{self._claim} {number}".encode()
        with self._writing_claim:
            if self._files.type_name == "local":  # else a full disk would leave an empty claim
                self._write(self._beside(self._claim), content)
                self._files.move(self._beside(self._claim), self._beside(CLAIM))
            else:
                self._write(self._beside(CLAIM), content)

    def _keep_claim(self) -> None:
        number = 0
        while not self._done.wait(CLAIMED_EVERY_S):
            number += 1
            with suppress(OSError, pa.ArrowException):  # the next one may succeed
                if self._is_ours():  # else a run that began together with this one was slower to claim it
                    self._write_claim(number)

    def _complete(self) -> None:
        """Give the folder its name.

        Raises:
            JobError: another run has taken it over, or has written it meanwhile.
        """
        if not self._is_ours():
            raise self._taken()
        if self._is_there(self._target):
            if not self._overwrite:
                raise self._exists()
            self._files.delete_dir(self._target)
        self._rename()
        for name, text in self._texts.items():
            self._write(f"{self._target}/{name}", text.encode())

    def _rename(self) -> None:
        if self.renames_at_once:
            self._files.move(self._temporary, self._target)
            return
        files = self._files
        files.create_dir(self._target)
        fs.copy_files(self._temporary, self._target, source_filesystem=files, destination_filesystem=files)

    def _write(self, path: str, content: bytes) -> None:
        with self._files.open_output_stream(path) as file:
            file.write(content)
