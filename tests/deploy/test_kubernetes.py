"""The manifests for Kubernetes: valid by Kubernetes' and the operator's schemas, and of one mind with what they run."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from spdist import errors
from spdist.foundation.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
VERSION = "1.35"
LAYERS = sorted(path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml"))
FOREIGN = {"DaskJob", "PodMonitor"}
"""Kinds that are not Kubernetes' own."""
PYTHON_BYTES = 400 << 20
"""What Python and its libraries take beside the memory limit, by deploy/README.md."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def merged(base: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: mappings key by key, lists of named items by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(one, dict) for one in base + patch):
        changed = {one["name"]: one for one in patch}
        assert changed.keys() <= {one["name"] for one in base}
        return [merged(one, changed.get(one["name"], {})) for one in base]
    return copy.deepcopy(patch)


def built(layer: str) -> tuple[list[dict[str, Any]], dict[str, Path]]:
    """Return the resources of a layer, patched as kustomize does it, and the files of the job by name."""
    folder = MANIFESTS / layer
    (kustomization,) = documents(folder / "kustomization.yaml")
    resources: list[dict[str, Any]] = []
    files: dict[str, Path] = {}
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            inherited, files = built(path.name)
            resources += inherited
        else:
            resources += documents(path)
    for entry in kustomization.get("patches", []):
        (patch,) = documents(folder / entry["path"])
        at = next(
            i
            for i, one in enumerate(resources)
            if (one["kind"], one["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"])
        )
        resources[at] = merged(resources[at], patch)
    for entry in kustomization.get("configMapGenerator", []):
        if entry.get("behavior") == "replace":
            assert files
            files = {}
        files |= {name: folder / name for name in entry["files"]}
    return resources, files


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    spec = resource["spec"]
    if resource["kind"] == "Job":
        return [spec["template"]["spec"]]
    if resource["kind"] == "DaskJob":
        cluster = spec["cluster"]["spec"]
        return [spec["job"]["spec"], cluster["scheduler"]["spec"], cluster["worker"]["spec"]]
    return []


@pytest.mark.parametrize("layer", LAYERS)
def test_resources_are_valid(layer):
    resources, files = built(layer)
    assert resources
    assert files
    for resource in resources:
        if resource["kind"] not in FOREIGN:
            kubernetes_validate.validate(resource, VERSION, strict=True)


def test_a_wrong_resource_is_found():
    (job,) = documents(MANIFESTS / "base" / "job.yaml")
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def of_operator() -> dict[str, Any]:
    """Return the schema of a DaskJob, from the operator's package, with Kubernetes' own types in their place."""
    found = importlib.util.find_spec("dask_kubernetes")
    if found is None or found.origin is None:
        pytest.skip("dask-kubernetes is not installed: make .venv/installed does it")
    folder = Path(found.origin).parent / "operator" / "customresources"
    core = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    types = json.loads((core / "_definitions.json").read_text().replace("_definitions.json#", "#"))["$defs"]
    own = yaml.safe_load((folder / "templates.yaml").read_text())

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(one) for one in node]
        if not isinstance(node, dict):
            return node
        place = str(node.get("$ref", ""))
        if place.startswith("python://k8s_crd_resolver"):
            return {"$ref": f"#/$defs/{place.rsplit('/', 1)[-1]}"}
        if place.startswith("python://"):
            target = own
            for key in place.partition("#/")[2].split("/"):
                target = target[key]
            return resolved(target)
        closed = {"additionalProperties": False} if node.get("type") == "object" and "properties" in node else {}
        return closed | {key: resolved(value) for key, value in node.items()}

    document = yaml.safe_load((folder / "daskjob.yaml").read_text())
    schema = resolved(document["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
    return schema | {"$defs": types}


def test_the_job_of_the_operator_is_valid():
    schema = of_operator()
    (job,) = documents(MANIFESTS / "operator" / "dask-job.yaml")
    jsonschema.Draft202012Validator(schema).validate(job)
    for key, value in (("replica", 2), ("replicas", "two")):
        wrong = copy.deepcopy(job)
        wrong["spec"]["cluster"]["spec"]["worker"][key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(wrong)


@pytest.fixture(scope="module")
def jobs():
    sys.path.insert(0, str(ROOT / "workflows"))
    try:
        import job
        import job_file
        import multiply
    finally:
        sys.path.remove(str(ROOT / "workflows"))
    readers = job_file.readers_of(multiply.Job)
    return SimpleNamespace(
        stopped=job.STOPPED,
        read=lambda path: {
            key: job.read_value(readers[key], key, value) for key, value in job_file.read_mapping(path).items()
        },
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_job_files_fit_the_pods(layer, jobs, monkeypatch):
    """They have keys that the batch entry knows, name mounted folders, and leave the pod enough memory."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    resources, files = built(layer)
    contents = {name: jobs.read(path) for name, path in files.items()}
    for resource in resources:
        for pod in pods(resource):
            for container in pod["containers"]:
                mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert {mount["name"] for mount in container["volumeMounts"]} <= {one["name"] for one in pod["volumes"]}
                if container["args"][0] == "python":
                    runs_index = "$(JOB_COMPLETION_INDEX)" in container["args"][-1]
                    count = resource["spec"]["completions"] if runs_index else 1
                    run = {
                        Path(container["args"][-1].replace("$(JOB_COMPLETION_INDEX)", str(i))).name
                        for i in range(count)
                    }
                    assert run == contents.keys()
                    for job in contents.values():
                        places = {str(Path(str(job[key])).parent) for key in ("a", "b", "out", "report")}
                        assert places <= mounted
                limit = container.get("resources", {}).get("limits", {}).get("memory")
                takes_blocks = container["args"][0] == "dask-worker" or resource["kind"] == "Job"
                for job in contents.values() if takes_blocks and limit else ():
                    own = job.get("memory_limit") if "engine" not in job else job["host_limit"]
                    assert 1.15 * parse_bytes(str(own)) + PYTHON_BYTES <= parse_bytes(f"{limit}B")


def test_there_is_a_pod_for_each_part(jobs, monkeypatch):
    resources, files = built("parts")
    (job,) = (one for one in resources if one["kind"] == "Job")
    parts = []
    for i in range(job["spec"]["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(i))
        parts.append(jobs.read(files["multiply.yaml"])["part"])
    assert parts == ["1/4", "2/4", "3/4", "4/4"]


@pytest.mark.parametrize("layer", LAYERS)
def test_pods_may_do_no_more_than_they_need(layer):
    for resource in built(layer)[0]:
        for pod in pods(resource):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is False
            for container in pod["containers"]:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_what_ends_a_job_and_what_starts_it_again(jobs):
    (job,) = documents(MANIFESTS / "base" / "job.yaml")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {errors.InputError.exit_code: "FailJob", jobs.stopped: "Ignore"}


def test_the_entry_point_knows_what_pods_run():
    programs = (ROOT / "deploy" / "entrypoint.sh").read_text()
    for layer in LAYERS:
        for resource in built(layer)[0]:
            for pod in pods(resource):
                for container in pod["containers"]:
                    assert f"{container['args'][0]} " in programs or f"{container['args'][0]})" in programs


def test_the_cluster_hears_itself_by_name_and_with_keys():
    resources, files = built("operator")
    job = next(one for one in resources if one["kind"] == "DaskJob")
    policy = next(one for one in resources if one["kind"] == "NetworkPolicy")
    service = f"tls://{job['metadata']['name']}-scheduler:8786"
    assert yaml.safe_load(files["multiply.yaml"].read_text())["scheduler"] == service
    for pod in pods(job):
        (container,) = pod["containers"]
        names = {one["name"]: one["value"] for one in container["env"]}
        assert names["DASK_SCHEDULER_ADDRESS"] == service
        paths = {value for name, value in names.items() if "__TLS__" in name}
        assert paths == {"/keys/ca.pem", "/keys/cert.pem", "/keys/key.pem"}
    cluster = {"dask.org/cluster-name": job["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == cluster
    selected = job["spec"]["cluster"]["spec"]["scheduler"]["service"]["selector"]
    assert selected == cluster | {"dask.org/component": "scheduler"}
    (monitor,) = documents(MANIFESTS / "operator" / "pod-monitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == selected
