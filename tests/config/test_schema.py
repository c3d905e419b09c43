"""The JSON schema in the repository is the one that the sections give, and describes every key."""

import json
from pathlib import Path
from typing import Any

from expertmesh.config.root import json_schema, schema_text

SCHEMA = Path(__file__).parents[2] / "schema" / "expertmesh.schema.json"


def test_the_schema_file_is_current() -> None:
    command = "expertmesh schema > schema/expertmesh.schema.json"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), f"regenerate it: {command}"


def test_every_key_has_a_description() -> None:
    schema = json_schema()
    sections: dict[str, Any] = {"": schema, **schema["$defs"]}
    assert all(section["description"] for section in sections.values())
    missing = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, field in section["properties"].items()
        if not field.get("description") and "$ref" not in field
    ]
    assert missing == []


def test_the_schema_refuses_unknown_keys_and_lists_choices() -> None:
    schema = json.loads(schema_text())
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["ScheduleConfig"]["properties"]["name"]["enum"] == [
        "cosine",
        "linear",
        "constant",
        "wsd",
        "inverse_sqrt",
    ]
