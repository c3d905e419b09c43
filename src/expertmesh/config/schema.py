"""The JSON schema of the configuration file, for completion and checks in editors.

`expertmesh schema > schema/expertmesh.schema.json` generates it from the sections. It says less than
`load_config` checks: rules between keys cannot be expressed in it.
"""

import json
from typing import Any

from expertmesh.config.root import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema as plain JSON values."""
    return {"$schema": DIALECT, **Config.model_json_schema(mode="validation")}


def schema_text() -> str:
    """Return the schema as it stands in the file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
