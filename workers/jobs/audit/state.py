"""The state of an audit in one file, with which the next audit of the same log reads only the new files.

The file is a zip archive. ``state.json`` has the format, a hash of the code that judges, the options, and the
hashes of the log's files and of the other members; the archive's comment is its hash. So a file that was
altered or cut short is refused, but not one that somebody made anew: keep it where nodes cannot write.
"""

from __future__ import annotations

import io
import json
import secrets
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from hashlib import sha256
from importlib import resources
from typing import Any, Final, Self
from uuid import uuid4

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs
from pyarrow import parquet as pq

from workers.jobs.audit import tables
from workers.jobs.audit.bucket_findings import SCHEMA
from workers.jobs.audit.covered_files import Content, LogFile
from workers.jobs.audit.limits import FactorChange, LimitChange
from workers.jobs.audit.replay import REPLAYS, Kept, LateRowsError
from workers.jobs.audit.scan import ASKS, USES, SavedRows, Scanned
from workers.jobs.batches import NO_NUMBERS, BatchSummary, Overview, Runs, WholeBatches, joined
from workers.jobs.errors import JobError
from workers.jobs.files import location_of, opened
from workers.jobs.folder import RENAMES_AT_ONCE
from workers.jobs.verdicts import SCHEMA as VERDICTS

FORMAT: Final = 1
HEADER: Final = "state.json"
CODE: Final = ("app.domain", "app.decision_log", "workers.decision_log", "workers.jobs", "workers.jobs.audit")
"""The packages whose code decides what an audit finds."""

ROWS_OF_A_TASK: Final = 500_000
RUNS: Final = pa.list_(pa.list_(pa.int64()))
BATCHES: Final = pa.schema(
    [
        ("batch", pa.string()),
        ("rows", pa.int64()),
        ("runs", RUNS),
        *((name, pa.int64()) for name in ("least", "most", "from_ms")),
    ]
)
CONTENTS: Final = pa.schema(
    [("file", pa.string()), ("batch", pa.string()), ("runs", RUNS), ("digest", pa.uint64())]
)
_BAD: Final = (
    *(OSError, ValueError, KeyError, TypeError),
    *(zipfile.BadZipFile, msgspec.MsgspecError, pa.ArrowException),
)
"""The errors of an archive that is no state."""

WHOLE: Final = pa.schema(
    [("node", pa.string()), ("number", pa.int64()), ("size", pa.int32()), ("from_ms", pa.int64())]
)
TIMES: Final = tuple(each.name for each in fields(Overview) if each.name.endswith("_ms"))


class _Counts(msgspec.Struct):
    """The parts of a state that are no tables."""

    key: bytes
    times: dict[str, int | None]
    siblings: list[tuple[str, int, int]]
    counts: dict[str, int]
    slices: list[tuple[int, str, int]]
    resets: list[tuple[str, str, list[int]]]
    loads: list[tuple[str, str, list[int]]]
    changes: dict[str, list[LimitChange]]
    factors: dict[str, list[FactorChange]]
    twice: list[tuple[str, int]]
    log_from_ms: int | None
    hours_removed: int


@dataclass(slots=True)
class AuditState:
    """The findings of an audit in the files of a log, and the state that its next run needs.

    Attributes:
        files: the files of the log that were read, by their path within the log.
        key: of the rows' digests.
        overview: the batches of these files.
        scanned: counts and findings of single rows.
        twice: the identities of rows in two versions.
        log_from_ms: when the log begins, if buckets may be older than it.
        hours_removed: how many hours, which earlier audits read, are no longer in the log.
        findings: the findings in the rows that the replays have passed.
        replays: the replays of the buckets.
        verdicts: the rows that the replays have not passed, and the rows that count for later ones.
    """

    files: dict[str, LogFile] = field(default_factory=dict)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    overview: Overview = field(default_factory=Overview)
    scanned: Scanned = field(default_factory=Scanned)
    twice: list[tuple[str, int]] = field(default_factory=list)
    log_from_ms: int | None = None
    hours_removed: int = 0
    findings: pa.Table = field(default_factory=SCHEMA.empty_table)
    replays: pa.Table = field(default_factory=REPLAYS.empty_table)
    verdicts: pa.Table = field(default_factory=VERDICTS.empty_table)

    def judge_by(self, log_from_ms: int | None) -> None:
        """Set when the log begins; buckets may be older than the log.

        Raises:
            LateRowsError: earlier audits judged by another beginning.
        """
        if self.files and self.log_from_ms != log_from_ms:
            raise LateRowsError("the log begins elsewhere now")
        self.log_from_ms = log_from_ms

    def overlaps(self, found: Overview) -> bool:
        """Whether rows of these batches are known already."""
        known = self.overview.numbers()
        for node, some in found.whole.items():
            mine = known.get(node, NO_NUMBERS)
            if any(np.isin(each.numbers, mine).any() for each in some):
                return True
        for batch, summary in found.batches.items():
            if self.overview.has_whole(batch):
                return True
            if (mine_ := self.overview.batches.get(batch)) is not None:
                both = joined([*mine_.runs, *summary.runs])
                if sum(last - first + 1 for first, last in both) < mine_.places + summary.places:
                    return True
        return False

    def saved_rows(self) -> list[SavedRows]:
        """The rows that the second stage needs again."""
        noted = pc.or_kleene(
            pc.equal(self.findings["case"], "falsely_seen"), pc.greater(self.findings["unlogged"], 0)
        )
        kept = (self.replays, self.findings.filter(noted), self.verdicts)
        return [
            SavedRows(table.slice(begin, ROWS_OF_A_TASK))
            for table in kept
            for begin in range(0, table.num_rows, ROWS_OF_A_TASK)
        ]

    def keep(self, kept: Iterable[Kept]) -> None:
        """Keep the results of the second stage, in place of the earlier ones."""
        if not (parts := list(kept)):
            return
        findings = pa.concat_tables([self.findings, *(part.findings for part in parts)])
        cases = findings.filter(pc.not_equal(findings["case"], "tally"))
        counts = tables.by_bucket(findings.filter(pc.equal(findings["case"], "tally")))
        self.findings = pa.concat_tables([counts, cases])
        self.replays = pa.concat_tables([REPLAYS.empty_table(), *(part.replays for part in parts)])
        self.verdicts = _not_counted(
            pa.concat_tables([VERDICTS.empty_table(), *(part.verdicts for part in parts)])
        )

    def save(self, url: str, options: Mapping[str, object]) -> None:
        """Write the state; the file appears complete or not at all.

        Raises:
            JobError: it cannot be written.
        """
        location = location_of(url)
        content = self._packed(options)
        files, path = opened(location)
        try:
            if files.type_name not in RENAMES_AT_ONCE:
                _write(files, path, content)
                return
            above, _, name = path.rpartition("/")
            files.create_dir(above)
            draft = f"{above}/_{name}.{uuid4().hex}.making"
            try:
                _write(files, draft, content)
                files.move(draft, path)
            except BaseException:
                with suppress(OSError, pa.ArrowException):
                    files.delete_file(draft)
                raise
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{location.name}: cannot be written: {location.redact(error)}") from None

    def _packed(self, options: Mapping[str, object]) -> bytes:
        scanned = self.scanned
        counts = _Counts(
            self.key,
            {name: getattr(self.overview, name) for name in TIMES},
            sorted(self.overview.siblings),
            dict(scanned.counts),
            [(from_ms, name, asks) for (from_ms, name), asks in scanned.slices.items()],
            [(*name, orders) for name, orders in scanned.resets.items()],
            [(*name, orders) for name, orders in scanned.loads.items()],
            scanned.changes,
            scanned.factors,
            self.twice,
            self.log_from_ms,
            self.hours_removed,
        )
        contents = [
            {"file": name, "batch": batch, "runs": content.runs, "digest": content.digest}
            for name, file in self.files.items()
            for batch, content in file.batches.items()
        ]
        members = {
            "counts.msgpack": msgspec.msgpack.encode(counts),
            "contents.parquet": _parquet(pa.Table.from_pylist(contents, CONTENTS)),
            "batches.parquet": _parquet(_batches(self.overview.batches)),
            "whole.parquet": _parquet(_whole(self.overview.whole)),
            "asks.parquet": _parquet(scanned.asks.table()),
            "uses.parquet": _parquet(scanned.uses.table()),
            "rows.parquet": _parquet(pa.concat_tables([SCHEMA.empty_table(), *scanned.findings])),
            "findings.parquet": _parquet(self.findings),
            "replays.parquet": _parquet(self.replays),
            "verdicts.parquet": _parquet(self.verdicts),
        }
        header = {
            "format": FORMAT,
            "code": code_hash(),
            "options": dict(options),
            "files": {name: file.sha256 for name, file in sorted(self.files.items())},
            "members": {name: sha256(content).hexdigest() for name, content in members.items()},
        }
        text = json.dumps(header, indent=1).encode()
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as archive:
            for name, content in {HEADER: text, **members}.items():
                archive.writestr(name, content)
            archive.comment = sha256(text).hexdigest().encode()
        return sink.getvalue()

    @classmethod
    def load(cls, url: str, options: Mapping[str, object]) -> Self | None:
        """The state in a file, if there is one.

        Raises:
            JobError: it is not a whole state, or one of other code, or of an audit with other options.
        """
        location = location_of(url)
        files, path = opened(location)
        try:
            with files.open_input_stream(path) as file:
                content = bytes(file.read())
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{location.name}: cannot be read: {location.redact(error)}") from None
        try:
            return cls._unpacked(_members(url, content, options))
        except _BAD as error:
            raise refused(
                url, f"is no whole state of an audit: it was altered or cut short ({error})"
            ) from None

    @classmethod
    def _unpacked(cls, members: Mapping[str, bytes]) -> Self:
        header = json.loads(members[HEADER])
        counts = msgspec.msgpack.decode(members["counts.msgpack"], type=_Counts)
        table = {
            name.removesuffix(".parquet"): pq.read_table(io.BytesIO(members[name]))
            for name in members
            if name.endswith(".parquet")
        }
        batches: dict[str, dict[str, Content]] = {name: {} for name in header["files"]}
        for row in table["contents"].to_pylist():
            batches[row["file"]][row["batch"]] = Content(_runs(row), row["digest"])
        scanned = Scanned(
            resets={(bucket, quota): orders for bucket, quota, orders in counts.resets},
            loads={(bucket, quota): orders for bucket, quota, orders in counts.loads},
            changes=counts.changes,
            factors=counts.factors,
            findings=[table["rows"].cast(SCHEMA)],
        )
        scanned.counts.update(counts.counts)
        scanned.slices.update({(from_ms, name): asks for from_ms, name, asks in counts.slices})
        scanned.asks.add(table["asks"].cast(ASKS))
        scanned.uses.add(table["uses"].cast(USES))
        return cls(
            {name: LogFile(hash_, batches[name]) for name, hash_ in header["files"].items()},
            counts.key,
            Overview(
                {row["batch"]: _summary(row) for row in table["batches"].to_pylist()},
                _whole_batches(table["whole"].cast(WHOLE)),
                {(node, number, at_ms) for node, number, at_ms in counts.siblings},
                **counts.times,
            ),
            scanned,
            counts.twice,
            counts.log_from_ms,
            counts.hours_removed,
            table["findings"].cast(SCHEMA),
            table["replays"].cast(REPLAYS),
            table["verdicts"].cast(VERDICTS),
        )


def refused(url: str, why: object) -> JobError:
    """The error of a state that cannot go on."""
    remedy = "remove the file, or name another one, and the log is read whole"
    return JobError(f"--state {location_of(url).name}: {why}; {remedy}")


def _members(url: str, content: bytes, options: Mapping[str, object]) -> dict[str, bytes]:
    """The members of an archive, after they were checked.

    Raises:
        JobError: it is of another version, or of an audit with other options.
        ValueError: a member does not have its hash.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    text = members[HEADER]
    if sha256(text).hexdigest().encode() != comment:
        raise ValueError(f"{HEADER} does not have its hash")
    header = json.loads(text)
    of_code: dict[str, object] = {"format": FORMAT, "code": code_hash()}
    for name, wanted in of_code.items():
        if header[name] != wanted:
            raise refused(url, f"{name}: is {header[name]}, must be {wanted}, that of this Quotagate")
    for name, wanted in options.items():
        if header["options"][name] != wanted:
            right = header["options"][name]
            raise refused(url, f"{name}: is {wanted}, must be {right}, as in the audit that made this state")
    for name, hash_ in header["members"].items():
        if sha256(members[name]).hexdigest() != hash_:
            raise ValueError(f"{name} does not have its hash")
    return members


def code_hash() -> str:
    """A hash of the code that decides what an audit finds."""
    found = sha256()
    for package in CODE:
        for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                found.update(file.name.encode() + b"\n" + file.read_bytes())
    return found.hexdigest()[:16]


def _batches(batches: Mapping[str, BatchSummary]) -> pa.Table:
    rows = [
        {
            "batch": batch,
            "rows": each.rows,
            "runs": [list(run) for run in each.runs],
            "least": each.least,
            "most": each.most,
            "from_ms": each.from_ms,
        }
        for batch, each in batches.items()
    ]
    return pa.Table.from_pylist(rows, BATCHES)


def _summary(row: Mapping[str, Any]) -> BatchSummary:
    return BatchSummary(row["rows"], _runs(row), row["least"], row["most"], row["from_ms"])


def _whole(whole: Mapping[str, Sequence[WholeBatches]]) -> pa.Table:
    columns = [
        pa.Table.from_arrays(
            [pa.array([node] * len(each.numbers), pa.string()), *map(pa.array, each[1:])], schema=WHOLE
        )
        for node, some in whole.items()
        for each in some
    ]
    return pa.concat_tables([WHOLE.empty_table(), *columns])


def _whole_batches(table: pa.Table) -> dict[str, list[WholeBatches]]:
    found = {}
    for node in table.column("node").unique().to_pylist():
        mine = table.filter(pc.equal(table["node"], node))
        numbers, sizes, from_ms = (mine[name].to_numpy() for name in ("number", "size", "from_ms"))
        found[node] = [WholeBatches(0, numbers, sizes, from_ms)]
    return found


def _runs(row: Mapping[str, Any]) -> Runs:
    return [(first, last) for first, last in row["runs"]]


def _not_counted(verdicts: pa.Table) -> pa.Table:
    """Verdicts whose limits were compared already."""
    place = VERDICTS.get_field_index("by_store")
    return verdicts.set_column(place, VERDICTS.field(place), pa.repeat(pa.scalar(False), verdicts.num_rows))


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _write(files: fs.FileSystem, path: str, content: bytes) -> None:
    with files.open_output_stream(path) as file:
        file.write(content)
