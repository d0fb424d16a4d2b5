"""What `kubectl kustomize` would give for our folders: the few of its features that they use, and an error for any other."""

import copy
from pathlib import Path
from typing import Any

import yaml

_KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "generatorOptions", "images", "patches"}


def build(folder: Path) -> list[dict[str, Any]]:
    """All objects of `folder`, in order."""
    described = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(described) <= _KNOWN, f"{folder}: this test knows no {set(described) - _KNOWN}"
    objects: list[dict[str, Any]] = []
    for name in described["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            assert not folder.resolve().is_relative_to(path), f"kustomize refuses a base above its overlay: {name}"
        objects += build(path) if path.is_dir() else [item for item in yaml.safe_load_all(path.read_text()) if item]
    for generator in described.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generator["files"]}
        metadata = {"name": generator["name"], "namespace": described["namespace"]}
        fresh = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        same = [item for item in objects if item["kind"] == "ConfigMap" and item["metadata"]["name"] == generator["name"]]
        assert bool(same) == (generator.get("behavior") == "replace"), f"{folder}: {generator['name']} made twice, or nothing to replace"
        objects = [item for item in objects if item not in same] + [fresh]
    for patch in described.get("patches", []):
        _patch(objects, patch["target"], yaml.safe_load(patch["patch"]), folder)
    return objects


def _patch(objects: list[dict[str, Any]], target: dict[str, str], operations: list[dict[str, Any]], folder: Path) -> None:
    met = [item for item in objects if item["kind"] == target["kind"] and target.get("name") in (None, item["metadata"]["name"])]
    assert met, f"{folder}: the patch of {target} meets nothing"
    for item in met:
        for operation in operations:
            assert operation["op"] == "replace", f"{folder}: this test knows no {operation['op']}"
            *way, last = [int(part) if part.isdigit() else part for part in operation["path"].strip("/").split("/")]
            owner: Any = item
            for part in way:
                owner = owner[part]
            owner[last] = copy.deepcopy(_present(owner, last) and operation["value"])


def _present(owner: Any, key: Any) -> bool:
    owner[key]  # "replace" needs something to replace: KeyError, IndexError
    return True
