"""Manifests against their published schemas, their arguments against our own loader, and what they name against what is there."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.runtime.config import Config, argument_parser, load_config
from tests.deploy.kustomize import build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "k8s"
SCHEMAS = ROOT.parent / "shared" / "reference" / "k8s"
OVERLAYS = ("disaggregatedset", "leaderworkersets", "trial")
_FIELDS = {"status.podIP": "10.1.2.3"}
COMPONENT = "app.kubernetes.io/component"


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return build(FOLDER / request.param)


def crd_schema(group: str, kind: str) -> dict[str, Any]:
    """Strict schema of a custom kind, from its published definition; skips where these files are not to be had."""
    if not SCHEMAS.is_dir():
        pytest.skip(f"no published schemas of {kind} on this machine")
    for path in sorted(SCHEMAS.glob("*.crd.yaml")):
        spec = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, kind):
            return _strict(spec["versions"][0]["schema"]["openAPIV3Schema"])
    raise AssertionError(f"no published schema of {group} {kind}")


def _strict(schema: Any) -> Any:
    """As an API server with strict field validation takes it: what is not named is refused."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    given = {key: value for key, value in schema.items() if key not in ("description", "default", "properties")}
    strict = {key: _strict(value) for key, value in given.items()}
    if "properties" in schema:
        strict["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            strict["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        strict["type"] = [schema["type"], "null"]
    return strict


_CRDS: dict[tuple[str, str], dict[str, Any]] = {}


def validate(item: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    group = item["apiVersion"].rpartition("/")[0]
    if "." not in group or (group.endswith(".k8s.io") and not group.endswith(".x-k8s.io")):
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
        return
    if (group, item["kind"]) not in _CRDS:
        _CRDS[group, item["kind"]] = crd_schema(group, item["kind"])
    plain = {key: value for key, value in item.items() if key != "metadata"}  # a definition leaves metadata to the API server
    jsonschema.Draft202012Validator(_CRDS[group, item["kind"]]).validate(json.loads(json.dumps(plain)))


def test_every_manifest_fits_its_schema(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        try:
            validate(item)
        except jsonschema.ValidationError as error:
            path = ".".join(str(part) for part in error.absolute_path)
            raise AssertionError(f"{item['kind']} {item['metadata']['name']}: {path}: {error.message[:300]}") from None
    named = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(named) == len(set(named))
    assert all(item["kind"] == "Namespace" or item["metadata"]["namespace"] == "baton" for item in objects)


@pytest.mark.parametrize("overlay, kind, path", [
    ("disaggregatedset", "DisaggregatedSet", "spec/roles/0/spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/readinesProbe"),
    ("disaggregatedset", "ScaledObject", "spec/triggers/0/metaData"),
    ("leaderworkersets", "LeaderWorkerSet", "spec/leaderWorkerTemplate/sizes"),
    ("trial", "Deployment", "spec/template/spec/containers/0/imagePolicy"),
    ("trial", "NetworkPolicy", "spec/ingres"),
])
def test_a_misspelt_field_is_refused(overlay: str, kind: str, path: str) -> None:
    item = next(item for item in build(FOLDER / overlay) if item["kind"] == kind)
    validate(item)
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    owner: Any = item
    for part in way:
        owner = owner[part]
    owner[last] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(item)


def test_external_roles_name_no_replicas() -> None:
    """The definition's own rule: replicas of an External role are its scaler's."""
    (pools,) = [item for item in build(FOLDER / "disaggregatedset") if item["kind"] == "DisaggregatedSet"]
    assert [role["name"] for role in pools["spec"]["roles"]] == ["prefill", "decode"]
    assert all(role["scaling"]["mode"] == "External" and not role["spec"].get("replicas") for role in pools["spec"]["roles"])


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by component."""
    found: list[dict[str, Any]] = []
    for item in objects:
        if item["kind"] == "Deployment":
            found.append(item["spec"]["template"])
        elif item["kind"] == "LeaderWorkerSet":
            found.append(item["spec"]["leaderWorkerTemplate"]["workerTemplate"])
        elif item["kind"] == "DisaggregatedSet":
            found += [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in item["spec"]["roles"]]
    return {template["metadata"]["labels"][COMPONENT]: template for template in found}


def loaded(objects: list[dict[str, Any]], template: dict[str, Any], tmp_path: Path) -> Config:
    """What the container's own loader makes of its arguments, with the cluster's ConfigMap where it is mounted."""
    (container,) = template["spec"]["containers"]
    (config_map,) = [item for item in objects if item["kind"] == "ConfigMap"]
    (tmp_path / "baton.toml").write_text(config_map["data"]["baton.toml"])
    variables = {item["name"]: item.get("value") or _FIELDS[item["valueFrom"]["fieldRef"]["fieldPath"]] for item in container["env"]} \
        if "env" in container else {}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], argument) for argument in container["args"]]
    assert arguments[:2] == ["--config", "/etc/baton/baton.toml"]
    parsed = argument_parser("test").parse_args(["--config", str(tmp_path / "baton.toml"), *arguments[2:]])
    return load_config(parsed.config, parsed.set)


def test_both_kinds_of_pools_run_the_same_pods() -> None:
    assert templates(build(FOLDER / "disaggregatedset")) == templates(build(FOLDER / "leaderworkersets"))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_our_own_loader_takes_every_containers_arguments(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    found = templates(objects)
    assert sorted(found) == ["decode", "prefill", "router"]
    for component, template in found.items():
        (container,) = template["spec"]["containers"]
        assert container["command"] == ["python", "-m", f"services.{component}"]
        assert importlib.util.find_spec(f"services.{component}.__main__")
        config = loaded(objects, template, tmp_path)
        section = getattr(config, component)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["grpc"] == port_of(section.address)
        assert ports["metrics"] == port_of(section.metrics)
        if component != "router":
            assert section.advertise == "10.1.2.3", "a wildcard is no address to dial"
            ranks = {name: port for name, port in ports.items() if name.startswith("metrics-rank")}
            assert ranks == {f"metrics-rank{rank}": ports["metrics"] + 1 + rank for rank in range(section.ranks)}
            assert section.drain_s < template["spec"]["terminationGracePeriodSeconds"] - 10
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, "kubelet's own gRPC probe speaks no TLS"


def test_files_that_the_settings_name_are_mounted(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    for template in templates(objects).values():
        (container,) = template["spec"]["containers"]
        config = loaded(objects, template, tmp_path)
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        security = config.security
        assert not security.insecure
        for path in (security.certificate, security.key, security.ca, security.curve_key):
            assert "secret" in mounts[str(Path(path).parent)], path
        model = Path(config.model.path)
        if model.is_absolute():
            assert "persistentVolumeClaim" in mounts[str(model.parent)]
        else:
            assert (ROOT / model / "config.json").is_file(), "relative to the image's working folder, which is this tree"
        assert container["securityContext"]["readOnlyRootFilesystem"] and "/tmp" in mounts
        assert template["spec"]["securityContext"]["runAsNonRoot"]


def _selectors(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Selectors of our own pods in Services, budgets and policies."""
    if item["kind"] == "Service":
        yield {"matchLabels": item["spec"]["selector"]}
    if item["kind"] == "PodDisruptionBudget":
        yield item["spec"]["selector"]
    if item["kind"] == "NetworkPolicy":
        yield item["spec"]["podSelector"]
        for rule in [*item["spec"].get("ingress", []), *item["spec"].get("egress", [])]:
            yield from (peer["podSelector"] for peer in [*rule.get("from", []), *rule.get("to", [])] if "podSelector" in peer)


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions)


def test_every_selector_meets_pods(objects: list[dict[str, Any]]) -> None:
    labels = [template["metadata"]["labels"] for template in templates(objects).values()]
    for item in objects:
        for selector in _selectors(item):
            assert any(_matches(selector, each) for each in labels), f"{item['kind']} {item['metadata']['name']}: {selector}"
    budgets = [item for item in objects if item["kind"] == "PodDisruptionBudget"]
    assert all(any(_matches(budget["spec"]["selector"], each) for budget in budgets) for each in labels)


def test_fronts_find_routers_that_are_not_ready_yet(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    services = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Service"}
    for component, template in templates(objects).items():
        if component != "router":
            (address,) = getattr(loaded(objects, template, tmp_path), component).routers
            found = services[address.partition(":")[0]]
            assert found["clusterIP"] == "None" and found["publishNotReadyAddresses"] is True
            assert port_of(address) in [port["port"] for port in found["ports"]]


def test_pools_reach_each_other_and_routers_and_nobody_else_reaches_them(objects: list[dict[str, Any]]) -> None:
    labels = {component: template["metadata"]["labels"] for component, template in templates(objects).items()}
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]

    def admitted(target: str, port: int) -> set[str]:
        rules = [rule for policy in policies if "Ingress" in policy["policyTypes"] and _matches(policy["podSelector"], labels[target])
                 for rule in policy.get("ingress", [])]
        open_rules = [rule for rule in rules if "ports" not in rule or any(
            limit["port"] <= port <= limit.get("endPort", limit["port"]) for limit in rule["ports"])]
        names = {name for name in labels for rule in open_rules for peer in rule["from"]
                 if "podSelector" in peer and _matches(peer["podSelector"], labels[name])}
        spaces = {str(sorted(peer["namespaceSelector"]["matchLabels"].items())) for rule in open_rules for peer in rule["from"]
                  if "namespaceSelector" in peer}
        return names | spaces

    assert admitted("prefill", 50051) == admitted("decode", 41234) == {"router", "prefill", "decode"}
    assert admitted("router", 50050) == {"prefill", "decode", "[('baton/client', 'true')]"}
    assert "[('kubernetes.io/metadata.name', 'monitoring')]" in admitted("decode", 9401)


def test_each_pool_is_scaled_by_what_its_processes_say(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    scaled = {item["spec"]["scaleTargetRef"]["name"]: item for item in objects if item["kind"] == "ScaledObject"}
    assert sorted(scaled) == ["baton-decode", "baton-prefill"]
    for item in scaled.values():
        target = item["spec"]["scaleTargetRef"]
        if target["kind"] == "DisaggregatedSetRoleScaler":  # the controller names them so
            (pools,) = [each for each in objects if each["kind"] == "DisaggregatedSet"]
            assert target["name"] in [f"{pools['metadata']['name']}-{role['name']}" for role in pools["spec"]["roles"]]
        else:
            assert target["name"] in [each["metadata"]["name"] for each in objects if each["kind"] == target["kind"]]
    config = loaded(objects, templates(objects)["decode"], tmp_path)
    thresholds = {trigger["name"]: trigger["metadata"]["threshold"] for trigger in scaled["baton-decode"]["spec"]["triggers"]}
    assert int(thresholds["requests"]) == int(0.8 * config.decode.max_running)
