"""Rows out of files, directories, object storage and hub data sets, each with a position that an error can name."""

from expertmesh.data.sources.locations import Location, locations, read_source, refuse_source
from expertmesh.data.sources.rows import BLOCK_ROWS, Columns, RawRow, RowShare, SourceFile

__all__ = [
    "BLOCK_ROWS",
    "Columns",
    "Location",
    "RawRow",
    "RowShare",
    "SourceFile",
    "locations",
    "read_source",
    "refuse_source",
]
