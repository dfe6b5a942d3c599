"""Trim the schema of a Kubernetes resource to what one of our manifests needs.

    git -C kserve show HEAD:config/crd/full/serving.kserve.io_inferenceservices.yaml |
        python deploy/kubernetes/trim_schema.py deploy/kubernetes/inferenceservice.yaml "SOURCE, LICENCE" > schema.json

The full schemas include Kubernetes' pods and take megabytes. This keeps the manifest's fields with their types, and the
names of their siblings, so that any other name is an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_DROPPED = ("description", "default", "x-kubernetes-validations")


def main() -> None:
    """Read the definition from stdin, write the schema to stdout."""
    manifest = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    definition = yaml.load(sys.stdin, yaml.CSafeLoader)
    group, version = manifest["apiVersion"].split("/")
    if (definition["spec"]["group"], definition["spec"]["names"]["kind"]) != (group, manifest["kind"]):
        sys.exit(f"the definition is for {definition['spec']['names']['kind']}, the manifest for {manifest['kind']}")
    (found,) = (one for one in definition["spec"]["versions"] if one["name"] == version)
    schema = trim(found["schema"]["openAPIV3Schema"], manifest)
    # the definition does not describe the metadata's fields
    schema["properties"]["metadata"] = {"type": "object"}
    schema["$comment"] = sys.argv[2]
    json.dump(schema, sys.stdout, indent=1, sort_keys=True)
    print()


def trim(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the part of a schema that describes a value, and refuse unknown fields."""
    kept = {key: part for key, part in schema.items() if key not in (*_DROPPED, "properties", "items")}
    if schema.get("x-kubernetes-int-or-string"):
        kept["type"] = ["integer", "string"]
        kept.pop("anyOf", None)
    if isinstance(value, list) and "items" in schema:
        merged: dict[str, Any] = {}
        for element in value:
            merged = _merge(merged, trim(schema["items"], element))
        kept["items"] = merged
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        kept["properties"] = {name: trim(part, value[name]) if name in value else {} for name, part in known.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    return kept


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            merged[key] = _merge(one[key], other[key])
    return merged


if __name__ == "__main__":
    main()
