"""The commit protocol of a dataset folder: a lock, attempts, and records that make them exist.

An actor writes `unit-N.<attempt>.arrow` to its end and syncs it. The one driver, holding the lock, commits it by creating
`unit-N.json`, the record that names the file. What no record names does not exist: the holder of the lock sweeps it.
"""

from pydantic import ValidationError

from ray_eagle.errors import DatasetError
from ray_eagle.hidden_states.plan import FORMAT, DatasetPlan
from ray_eagle.hidden_states.shard import UnitRecord
from ray_eagle.lock import Lock, create_once
from ray_eagle.run import Folder, content_hash

PLAN = "dataset.json"


def record_name(unit: int) -> str:
    return f"unit-{unit:05d}.json"


def read_plan(folder: Folder) -> DatasetPlan:
    """Raises DatasetError when there is no dataset, a damaged one, or one of another format."""
    if not folder.exists(PLAN):
        raise DatasetError(f"{folder.path}: expected a dataset with {PLAN}, found none. Run `ray-eagle extract` first.")
    where, way_out = folder.file(PLAN), "Redo it: `ray-eagle extract --redo`."
    stored = folder.read_json(PLAN)
    seal = stored.pop("seal", None)
    if stored.get("format") != FORMAT:
        raise DatasetError(f"{where}: expected format {FORMAT}, found {stored.get('format')}. {way_out}")
    if seal != content_hash(stored):
        raise DatasetError(f"{where} is damaged: its content does not match its seal. {way_out}")
    try:
        return DatasetPlan.model_validate(stored)
    except ValidationError as error:
        raise DatasetError(
            f"{where} is damaged: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}. {way_out}"
        ) from None


def write_plan(folder: Folder, plan: DatasetPlan) -> None:
    """dataset.json, sealed."""
    content = plan.model_dump(mode="json")
    folder.write_json(PLAN, {**content, "seal": content_hash(content)})


def read_records(folder: Folder, plan: DatasetPlan) -> dict[int, UnitRecord]:
    """Records of the committed units of the plan. Raises DatasetError for a damaged record."""
    present = set(folder.names())
    records = {}
    for index in range(len(plan.units)):
        name = record_name(index)
        if name in present:
            try:
                records[index] = parse_record(folder.read_bytes(name))
            except ValueError as error:
                raise DatasetError(
                    f"{folder.file(name)} is damaged ({error}). Run `ray-eagle verify {folder.path} --repair`, then extract."
                ) from None
    return records


def parse_record(data: bytes) -> UnitRecord:
    """Raises ValueError, in a few words, for anything but an intact record."""
    try:
        record = UnitRecord.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    if record.seal != record.expected_seal() or record.model_dump_json().encode() != data:
        raise ValueError("its content does not match its seal")
    return record


class DatasetWriter:
    """The one driver of a dataset folder; a context manager that holds the lock.

    Raises LockedError when another driver holds it, DatasetError when the folder holds a dataset of another plan.
    """

    def __init__(self, folder: Folder, plan: DatasetPlan) -> None:
        self.folder = folder
        self.plan = plan
        self.lock = Lock(folder)

    def __enter__(self) -> "DatasetWriter":
        self.lock.__enter__()
        try:
            if self.folder.exists(PLAN):
                if read_plan(self.folder) != self.plan:
                    raise DatasetError(
                        f"{self.folder.path} holds a dataset of another plan (other samples, layers or settings). "
                        "Use another run folder, or redo it: `ray-eagle extract --redo`."
                    )
            else:
                write_plan(self.folder, self.plan)
            self.records = read_records(self.folder, self.plan)
            self._sweep()
        except BaseException:
            self.lock.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock.held():
            self._sweep()
        self.lock.__exit__()

    def commit(self, record: UnitRecord, *, disturbed: bool = False) -> None:
        """Make an attempt exist. `disturbed`: actors died, so other attempts at the unit may lie around; they are deleted.

        A unit is committed once; raises DatasetError for a second time, for rows that are not the planned ones, and when the
        filesystem takes no more.
        """
        name = self.folder.file(record_name(record.unit))
        made = {row.sample_id for row in record.rows} | {row.sample_id for row in record.quarantined}
        if made != set(self.plan.units[record.unit].samples):
            raise DatasetError(
                f"{name}: unit {record.unit} came back with other samples than planned. Report this bug."
            )
        record.seal = record.expected_seal()
        try:
            created = create_once(self.folder, record_name(record.unit), record.model_dump_json().encode())
        except OSError as error:
            raise DatasetError(
                f"{name} cannot be written ({error}). Free some space, or check the filesystem; then run the stage again: "
                "what was committed is kept."
            ) from None
        if not created:
            raise DatasetError(f"{name} exists already: unit {record.unit} was committed twice.")
        self.records[record.unit] = record
        if disturbed:
            self._sweep(f"unit-{record.unit:05d}.")

    def _sweep(self, prefix: str = "") -> None:
        named = {record.file for record in self.records.values()}
        for name in self.folder.names():
            attempt = name.endswith(".arrow") and name not in named and name.startswith(prefix)
            if attempt or (name.endswith(".tmp") and not prefix):
                self.folder.delete_file(name)
