"""Trims the schemas of JobSet and LeaderWorkerSet to what a test of manifests needs.

    python tests/golden/make_kubernetes_schemas.py JOBSET_CHECKOUT LWS_CHECKOUT

Each argument is a git checkout of kubernetes-sigs/jobset and kubernetes-sigs/lws. Descriptions are
left out, and pod templates that come twice are kept once. Both are under the Apache License 2.0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "kubernetes"
SOURCES = {
    "jobset": (
        "kubernetes-sigs/jobset",
        "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    ),
    "leaderworkerset": (
        "kubernetes-sigs/lws",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    ),
}
POD_TEMPLATE = "podTemplate"


def without_descriptions(schema: Any) -> Any:
    """The schema without texts; a property may be called `description`."""
    if isinstance(schema, list):
        return [without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: without_descriptions(each) for key, each in value.items()}
        if name == "properties"
        else without_descriptions(value)
        for name, value in schema.items()
        if name != "description"
    }


def share_pod_templates(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with references to its pod templates; those of one CRD are all the same."""
    if isinstance(schema, list):
        return [share_pod_templates(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = schema.get("properties", {}).get("spec", {})
    if "containers" in inner.get("properties", {}):
        if definitions.setdefault(POD_TEMPLATE, schema) != schema:
            raise ValueError("the CRD has two kinds of pod templates")
        return {"$ref": f"#/$defs/{POD_TEMPLATE}"}
    return {name: share_pod_templates(value, definitions) for name, value in schema.items()}


def git(checkout: str, *arguments: str) -> str:
    command = ["git", "-C", checkout, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(checkouts: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for (name, (repository, path)), checkout in zip(SOURCES.items(), checkouts, strict=True):
        crd = yaml.safe_load(git(checkout, "show", f"HEAD:{path}"))
        (version,) = (each for each in crd["spec"]["versions"] if each["storage"])
        definitions: dict[str, Any] = {}
        schema = without_descriptions(version["schema"]["openAPIV3Schema"])
        schema = share_pod_templates(schema, definitions)
        commit = git(checkout, "rev-parse", "HEAD").strip()
        content = {
            "source": f"https://github.com/{repository}/blob/{commit}/{path}",
            "licence": "Apache-2.0",
            "changes": "descriptions left out; pod templates of a CRD kept once, in $defs",
            "kind": crd["spec"]["names"]["kind"],
            "apiVersion": f"{crd['spec']['group']}/{version['name']}",
            "schema": {**schema, "$defs": definitions},
        }
        (FOLDER / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
