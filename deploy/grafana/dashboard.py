"""Writes dashboards/baton.json from panels.py: `python -m deploy.grafana.dashboard`. A test says when it is no longer what this gives.

Plain dictionaries of Grafana's dashboard model: grafana-foundation-sdk on PyPI is generated for Grafana 10.1 and calls itself alpha.
"""

import json
from pathlib import Path
from typing import Any

from deploy.grafana.panels import ROWS, Panel

FILE = Path(__file__).with_name("dashboards") / "baton.json"
_SCHEMA_VERSION = 39  # Grafana 10.4 and 11; later ones migrate it when they load it
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _ALL = 8, 8, 24


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.is_stacked else 5, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for place, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS:
        found.append({
            "id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _ALL, "h": 1},
        })
        y += 1
        for place, panel in enumerate(panels):
            lines, column = divmod(place, _ALL // _WIDTH)
            found.append(_panel(panel, len(found) + 1, column * _WIDTH, y + lines * _HEIGHT))
        y += -(-len(panels) // (_ALL // _WIDTH)) * _HEIGHT
    return found


def dashboard() -> dict[str, Any]:
    """The whole model."""
    source = {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0, "includeAll": False,
        "multi": False, "refresh": 1, "regex": "", "options": [], "current": {},
    }
    return {
        "uid": "baton", "title": "Baton", "tags": ["baton"], "schemaVersion": _SCHEMA_VERSION, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
        "templating": {"list": [source]}, "annotations": {"list": []}, "links": [], "panels": _panels(),
    }


def written() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
