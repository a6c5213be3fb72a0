"""The fleet's manifests: fields as JobSet and LeaderWorkerSet have them, arguments as ours.

The schemas are those of the projects' own definitions, see tests/golden/make_kubernetes_schemas.py.
Kubernetes refuses or prunes what they do not name, so that a field of another name is an error
here. Their rules in CEL are not evaluated.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

from fleet.services import ROUTERS
from tests.devices import ROOT
from tunix_sgljax.cli import main as command_line

MANIFESTS = ROOT / "examples/fleet/kubernetes"
SCHEMAS = ROOT / "tests/golden/kubernetes"


def strict(schema: Any) -> Any:
    """The schema in which an object has no fields but those named."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        made.setdefault("additionalProperties", is_open)
    return made


def read_schema(name: str) -> tuple[tuple[str, str], dict[str, Any]]:
    """(apiVersion, kind) and the strict schema."""
    content = json.loads((SCHEMAS / f"{name}.json").read_text())
    return (content["apiVersion"], content["kind"]), strict(content["schema"])


def job_schema(jobset: dict[str, Any]) -> dict[str, Any]:
    """The schema of a Job, which JobSet's holds."""
    template = jobset["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]
    job = copy.deepcopy(template["template"])
    job["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {**job, "$defs": jobset["$defs"]}


_KINDS = dict(read_schema(name) for name in ("jobset", "leaderworkerset"))
_KINDS["batch/v1", "Job"] = job_schema(_KINDS["jobset.x-k8s.io/v1alpha2", "JobSet"])


class Manifest(NamedTuple):
    file: str
    content: dict[str, Any]

    def errors(self) -> list[str]:
        schema = _KINDS[self.content["apiVersion"], self.content["kind"]]
        found = jsonschema.Draft202012Validator(schema).iter_errors(self.content)
        return [f"{error.json_path}: {error.message}" for error in found]


def read_manifests() -> list[Manifest]:
    return [
        Manifest(path.name, content)
        for path in sorted(MANIFESTS.glob("*.yaml"))
        for content in yaml.safe_load_all(path.read_text())
    ]


ALL = read_manifests()
each_manifest = pytest.mark.parametrize(
    "manifest", ALL, ids=lambda each: f"{each.file}-{each.content['metadata']['name']}"
)


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all mappings in a manifest."""
    if isinstance(value, dict):
        yield path
        for name, each in value.items():
            yield from objects(each, (*path, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from objects(each, (*path, i))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    for path in objects(value):
        found = at(value, path)
        if "containers" in found:
            yield found


def containers(name: str, file: str | None = None) -> list[dict[str, Any]]:
    """The containers of this name."""
    return [
        container
        for manifest in ALL
        if file in (None, manifest.file)
        for spec in pod_specs(manifest.content)
        for container in spec["containers"]
        if container["name"] == name
    ]


FILES = sorted({manifest.file for manifest in ALL})


def test_what_there_is():
    assert FILES == ["jobset.yaml", "leaderworkerset.yaml"]
    for file in FILES:
        for name in ("trainer", "router", "worker"):
            assert len(containers(name, file)) == 1
        assert "# Not run:" in (MANIFESTS / file).read_text()
    for path in SCHEMAS.glob("*.json"):
        content = json.loads(path.read_text())
        assert re.search(r"github\.com/kubernetes-sigs/\w+/blob/[0-9a-f]{40}/", content["source"])
        assert content["licence"] == "Apache-2.0"


@each_manifest
def test_fields_are_those_of_the_schema(manifest):
    assert manifest.errors() == []


_FREE = {"metadata", "nodeSelector", "limits", "requests"}
"""Mappings whose names are the user's; metadata of a whole object is checked elsewhere."""


@each_manifest
def test_any_unknown_field_is_found(manifest):
    """Else the test above could not fail."""
    tried = 0
    for path in objects(manifest.content):
        if path and path[-1] in _FREE:
            continue
        other = copy.deepcopy(manifest.content)
        at(other, path)["noSuchField"] = "x"
        assert Manifest(manifest.file, other).errors(), path
        tried += 1
    assert tried > 5


@each_manifest
def test_any_other_type_is_found(manifest):
    for path in objects(manifest.content):
        if not path or path == ("metadata",):
            continue
        other = copy.deepcopy(manifest.content)
        at(other, path[:-1])[path[-1]] = 1.5
        assert Manifest(manifest.file, other).errors(), path


@each_manifest
def test_volumes_and_ports_are_there(manifest):
    for spec in pod_specs(manifest.content):
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            ports = {port["name"] for port in container.get("ports", ())}
            probes = [container[key] for key in container if key.endswith("Probe")]
            for probe in probes:
                assert probe["httpGet"]["path"] == "/health"
                assert probe["httpGet"]["port"] in ports


def test_a_job_restarts_its_pods():
    """`Always` is not allowed there, and `Never` would make another pod."""
    for manifest in ALL:
        if manifest.content["kind"] != "LeaderWorkerSet":
            for spec in pod_specs(manifest.content):
                assert spec["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("file", FILES)
class TestArguments:
    def worker_arguments(self, file):
        (worker,) = containers("worker", file)
        program, command = worker["command"]
        assert program == "tunix-sgljax"
        variables = {variable["name"]: "10.0.0.1" for variable in worker["env"]}
        texts = [
            re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)
            for text in worker["args"]
        ]
        argv = [command, *texts]
        return command_line.make_parser(argv).parse_args(argv)

    def test_workers_are_started_as_our_command_wants(self, file):
        args = self.worker_arguments(file)
        (worker,) = containers("worker", file)
        (port,) = worker["ports"]
        assert args.port == port["containerPort"]
        assert args.advertise == f"http://10.0.0.1:{args.port}"
        (mount,) = worker["volumeMounts"]
        assert args.weights_store.startswith(mount["mountPath"])
        assert args.model.startswith(mount["mountPath"])
        # Keys, as the server is reached from other hosts.
        assert args.host == "0.0.0.0"
        names = {variable["name"] for variable in worker["env"]}
        assert {"TUNIX_SGLJAX_API_KEY", "TUNIX_SGLJAX_ADMIN_KEY"} <= names

    def test_all_know_the_router_by_one_address(self, file):
        args = self.worker_arguments(file)
        (trainer,) = containers("trainer", file)
        (url,) = (each["value"] for each in trainer["env"] if each["name"] == "FLEET_URL")
        assert args.join == url
        (manifest, *_) = [each.content for each in ALL if each.file == file]
        name = manifest["metadata"]["name"]
        host = f"{name}-router-0-0.{name}" if file == "jobset.yaml" else f"{name}-0.{name}"
        (router,) = containers("router", file)
        assert "router" in host
        assert url == f"http://{host}:{router['ports'][0]['containerPort']}"
        assert f"--port={router['ports'][0]['containerPort']}" in router["args"]
        assert tuple(router["command"]) == ROUTERS["sglang"][:2]

    def test_keys_are_the_same_for_all(self, file):
        keys = [
            {
                variable["valueFrom"]["secretKeyRef"]["key"]: variable["valueFrom"]["secretKeyRef"]
                for variable in container["env"]
                if "secretKeyRef" in variable.get("valueFrom", {})
            }
            for name in ("worker", "trainer")
            for container in containers(name, file)
        ]
        assert keys[0] == keys[1]
        assert keys[0].keys() == {"api", "admin"}
