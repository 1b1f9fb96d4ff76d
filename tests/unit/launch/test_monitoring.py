"""Dashboard and alert rules ask for series that there are, with labels that they have."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from disagg import errors
from tests.house.metrics_page import metrics_with_everything
from tests.unit.launch.rendered import K8S

FOLDER = K8S / "components/monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0][
    "rules"
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
(POD_MONITOR,) = yaml.safe_load_all((FOLDER / "podmonitor.yaml").read_text())


def series() -> dict[str, set[str]]:
    """What a router exposes: the names of all samples, with their labels."""
    found: dict[str, set[str]] = {}
    for metric in text_string_to_metric_families(metrics_with_everything().text()):
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SERIES = series()
CODES = {
    one.code
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.DisaggError)
}


def asked(node: Any) -> Iterator[tuple[str, list[Any]]]:
    """Name and matchers of every selector in an expression."""
    match node:
        case promql_parser.VectorSelector():
            yield str(node.name), list(node.matchers.matchers)
        case promql_parser.MatrixSelector():
            yield from asked(node.vector_selector)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from asked(node.expr)
        case promql_parser.BinaryExpr():
            yield from asked(node.lhs)
            yield from asked(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from asked(argument)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"{node!r} is not known here")


def grouped_by(expression: str) -> set[str]:
    """Labels in every by (...) and on (...)."""
    lists = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    return {label.strip() for one in lists for label in one.split(",")}


def faults(expression: str) -> list[str]:
    """What an expression asks for that no router has."""
    expression = expression.replace("$__rate_interval", "5m").replace("$model", "m")
    found, there = [], set()
    for name, matchers in asked(promql_parser.parse(expression)):
        if name not in SERIES:
            found.append(f"there is no series {name}")
            continue
        there |= SERIES[name]
        for matcher in matchers:
            if matcher.name not in SERIES[name]:
                found.append(f"{name} has no label {matcher.name}")
            if matcher.name == "outcome":
                unknown = set(str(matcher.value).split("|")) - CODES - {"stop", "length"}
                found += [f"there is no outcome {one}" for one in sorted(unknown)]
    return found + [f"nothing there has a label {one}" for one in grouped_by(expression) - there]


EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
]


def test_every_expression_asks_for_what_there_is() -> None:
    assert len(EXPRESSIONS) > 30
    assert {text: found for text in EXPRESSIONS if (found := faults(text))} == {}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(disagg_request_total[5m])", "there is no series disagg_request_total"),
        ("disagg_requests_live{role='x'}", "disagg_requests_live has no label role"),
        ("sum by (tenants) (disagg_requests_total)", "nothing there has a label tenants"),
        ("disagg_requests_total{outcome=~'stop|expired'}", "there is no outcome expired"),
        ("sum(a) / sum(b)", "there is no series b"),
    ],
)
def test_what_there_is_not_is_seen(expression: str, fault: str) -> None:
    assert fault in faults(expression)


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        faults("sum(rate(disagg_requests_total)")


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= grouped_by(rule["expr"]), rule["alert"]


def test_failures_are_those_that_are_no_clients_mistake() -> None:
    (rule,) = [one for one in RULES if one["alert"] == "DisaggRequestsFail"]
    found = re.search(r'outcome=~"([^"]*)"', rule["expr"])
    assert found is not None
    of_ours = {
        one.code
        for one in vars(errors).values()
        if isinstance(one, type)
        and issubclass(one, errors.DisaggError)
        and not issubclass(one, errors.ConfigError | errors.StoppingError)
        and one.http_status >= 500
    }
    assert set(found[1].split("|")) == of_ours


def test_the_dashboards_panels_are_apart() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places
        assert at["x"] + at["w"] <= 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    (model,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "model"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"])
    assert found is not None
    assert found[2] in SERIES[found[1]]


def test_the_pod_monitor_asks_the_admin_port_of_the_routers() -> None:
    deployment = next(yaml.safe_load_all((K8S / "base/router.yaml").read_text()))
    template = deployment["spec"]["template"]
    (endpoint,) = POD_MONITOR["spec"]["podMetricsEndpoints"]
    ports = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert endpoint["port"] in ports
    assert POD_MONITOR["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert endpoint["path"] == template["metadata"]["annotations"]["prometheus.io/path"]


def test_the_readmes_prometheus_rule_has_these_rules() -> None:
    """Its lines of shell say what they make of the file; here it is made by hand of those lines."""
    text = (K8S / "README.md").read_text()
    found = re.search(r"printf '([^']*)'; sed '([^']*)' (\S+);", text)
    assert found is not None
    assert found[2] == "s/^/  /"
    assert K8S.parent / shlex.split(found[3])[0] == FOLDER / "alerts.yaml"
    head = found[1].encode().decode("unicode_escape")
    rule = yaml.safe_load(head + re.sub("(?m)^", "  ", (FOLDER / "alerts.yaml").read_text()))
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"]["groups"][0]["rules"] == RULES
