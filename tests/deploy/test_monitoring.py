"""Dashboard, alerts and Prometheus's configuration: current, and about metrics that our processes really export."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

import services.decode.metrics
import services.kv.metrics
import services.prefill.metrics
import services.router.metrics
import services.runtime.telemetry  # noqa: F401  each defines what its processes export
from deploy.grafana.dashboard import FILE, dashboard, written
from deploy.grafana.panels import ROWS

DEPLOY = Path(__file__).parents[2] / "deploy"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",), "gauge": ("",)}
SCRAPED_LABELS = {"role", "instance", "job", "process", "exported_role"}
UNSHOWN: set[str] = set()


def exported() -> dict[str, str]:
    """Every series name of ours and the family that it is of."""
    return {
        f"{family.name}{suffix}": family.name for family in REGISTRY.collect() if family.name.startswith(("baton_", "process_"))
        for suffix in SUFFIXES[family.type]
    }


def names_in(expression: str) -> set[str]:
    """Metric names, without what stands in label matchers, strings and ranges."""
    return set(re.findall(r"\b(?:baton|process)_\w+", re.sub(r'\{[^}]*\}|"[^"]*"|\[[^]]*\]', "", expression)))


def expressions() -> dict[str, str]:
    """All PromQL of panels and alerts, by where it stands."""
    found = {f"{row}: {panel.title} {number}": expr for row, panels in ROWS for panel in panels
             for number, (expr, _) in enumerate(panel.queries)}
    return found | {f"alert {rule['alert']}": rule["expr"] for rule in alerts()}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_dashboard_file_is_what_the_generator_gives() -> None:
    assert FILE.read_text() == written(), "run: python -m deploy.grafana.dashboard"


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    cells = Counter(
        (x, y) for panel in panels for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1 and max(x for x, _ in cells) == 23
    for panel in panels:
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters) and (letters or panel["type"] == "row")


@pytest.mark.parametrize("where", expressions())
def test_expressions_ask_for_what_is_exported(where: str) -> None:
    expression = expressions()[where]
    names = names_in(expression)
    assert names or expression.startswith("up{"), f"no metric of ours in {expression}"
    assert names <= exported().keys(), f"{names - exported().keys()} in {expression}"
    for name in names:
        if name.endswith(("_total", "_bucket", "_sum", "_count")) and not name.startswith("baton_requests_queued"):
            assert re.search(rf"rate\({name}(\{{[^}}]*\}})?\[", expression), f"{name} only grows: {expression} lacks its rate"


@pytest.mark.parametrize("where", expressions())
def test_labels_are_those_that_series_have(where: str) -> None:
    expression = expressions()[where]
    families = {exported()[name] for name in names_in(expression)}
    own = {label for family in REGISTRY.collect() if family.name in families for sample in family.samples for label in sample.labels}
    without_series_yet = {"baton_recoveries": {"path", "reason"}, "baton_incidents": {"what", "reason"}, "baton_build": {"version"}}
    own |= set[str]().union(*(without_series_yet.get(family, set()) for family in families))
    asked = set(re.findall(r"(\w+)=~?\"", expression))
    for listed in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        asked |= {label.strip() for label in listed.split(",")}
    assert asked <= own | SCRAPED_LABELS, f"{asked - own - SCRAPED_LABELS} in {expression}"


def test_whatever_is_exported_is_shown() -> None:
    families = {family for family in exported().values() if family.startswith("baton_")}
    shown = {exported()[name] for expression in expressions().values() for name in names_in(expression)}
    assert families - shown == UNSHOWN


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert rule["alert"].startswith("Baton") and rule["for"] and rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")


def test_provisioning_names_what_the_dashboard_asks_for() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert [(source["type"], source["isDefault"]) for source in sources] == [("prometheus", True)]
    interval = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert sources[0]["jsonData"]["timeInterval"] == interval, "or $__rate_interval would be too short for a rate"
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/baton.yaml").read_text())["providers"]
    assert providers[0]["options"]["path"] == "/var/lib/grafana/dashboards"
    assert {"label": "Prometheus", "query": "prometheus"}.items() <= dashboard()["templating"]["list"][0].items()
    assert json.loads(FILE.read_text())["uid"] == "baton"


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.local.yml"])
def test_every_job_gives_its_targets_a_role(name: str) -> None:
    for job in yaml.safe_load((DEPLOY / name).read_text())["scrape_configs"]:
        relabelled = {rule["target_label"]: rule["replacement"] for rule in job.get("relabel_configs", [])}
        if "file_sd_configs" in job:
            assert job["file_sd_configs"][0]["files"] == ["../.run/metrics.json"], "whose entries have a role"
        else:
            assert relabelled == {"role": job["job_name"]}
            assert {config["names"][0] for config in job["dns_sd_configs"]} == {job["job_name"]}, "the service's name"


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.local.yml"])
def test_promtool_accepts_the_configuration(name: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    checked = subprocess.run([promtool, "check", "config", str(DEPLOY / name)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
