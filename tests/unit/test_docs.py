"""Tables in the documentation are whole: each row has as many cells as its header."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELL_END = re.compile(r"(?<!\\)\|")


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_each_row_of_a_table_has_the_headers_cells(page: str) -> None:
    above = 0
    for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), 1):
        cells = len(CELL_END.findall(line)) if line.startswith("|") else 0
        assert not (above and cells) or cells == above, f"{page}:{number}: {line}"
        above = cells
