"""Writes what is made from deploy/kubernetes and deploy/observability: the chart's templates, the schema of its values and the
PrometheusRule.

    make manifests

A template is the object of the base. Where a component or the HA overlay changes it, both forms stand in an `if` of the value
that chooses it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KUBERNETES = HERE.parent / "kubernetes"
TEMPLATES = HERE / "pointsman" / "templates"
SCHEMA = HERE / "pointsman" / "values.schema.json"
RULES = HERE.parent / "observability" / "alerts.yaml"
PROCESS_SETTINGS = HERE.parents[1] / "shared" / "pointsman" / "runtime" / "process_settings.json"
PROMETHEUS_RULE = KUBERNETES / "components" / "monitoring" / "prometheus-rule.yaml"
NAMESPACE = "pointsman"
VALUES = {
    ".Values.highAvailability": {"resources": ["overlays/ha"]},
    # vLLM's engines serve another model.
    "(and .Values.simulatedEngines (not .Values.vllm.enabled))": {
        "resources": ["base"],
        "components": ["components/simulated-engines"],
    },
    ".Values.vllm.enabled": {"resources": ["base"], "components": ["components/vllm"]},
    ".Values.monitoring": {"resources": ["base"], "components": ["components/monitoring"]},
    ".Values.console": {"resources": ["base"], "components": ["components/console"]},
    # KEDA scales vLLM's Deployment.
    "(and .Values.keda .Values.vllm.enabled)": {"resources": ["base"], "components": ["components/keda"]},
}
# Text of the manifests, and what a chart has in its place. With the default values both are the same.
REPLACED = (
    (re.compile(r"^pointsman:[\d.]+$"), "{{ .Values.image }}"),
    (re.compile(r"^vllm/vllm-openai:.*"), "{{ .Values.vllm.image }}"),
    (re.compile(r"^Qwen/.*"), "{{ .Values.vllm.model }}"),
    (re.compile(r"(?<=^kubernetes:pointsman\.io/pool=)default$"), "{{ .Values.pool }}"),
    (re.compile(r"(?<=^http://pointsman-scaler\.)pointsman(?=\.svc)"), "{{ .Release.Namespace }}"),
)
REPLACED_KEYS = {
    "namespace": (NAMESPACE, "{{ .Release.Namespace }}"),
    "pointsman.io/pool": ("default", "{{ .Values.pool }}"),
    "POINTSMAN_POOL": ("default", "{{ .Values.pool }}"),
}
# Text of a value of any type. Helm reads numbers as float64, of which `print` makes 1e+06.
SETTINGS = """\
  {{- range $name, $value := .Values.settings }}
  {{- if eq (printf "%T" $value) "float64" }}
  {{ $name }}: "{{ printf "%.15g" $value }}"
  {{- else }}
  {{ $name }}: {{ printf "%q" (print $value) }}
  {{- end }}
  {{- end }}
"""
# A setting of the manifests, in a ConfigMap or in `env`, gives way to one of the values with its name.
SETTING = re.compile(r"^  (?P<name>POINTSMAN_\w+): .*$", re.MULTILINE)
VARIABLE = re.compile(r"^( +)- name: (?P<name>POINTSMAN_\w+)\n\1  value: .*$", re.MULTILINE)
UNLESS_SET = r"""{{- if eq (print (index .Values.settings "\g<name>")) "<nil>" }}
\g<0>
{{- end }}"""
# But for those on which volumes, ports, names and accounts of the manifests depend: Helm refuses these values.
FIXED = (
    *("POINTSMAN_SECRET_FILE", "POINTSMAN_NATS_CREDENTIALS", "POINTSMAN_STATE_DIRECTORY"),
    *("POINTSMAN_PORT", "POINTSMAN_ADMIN_HOST", "POINTSMAN_ADMIN_PORT"),
    *("POINTSMAN_NAME", "POINTSMAN_PROVIDER"),
)
FIXED_REASON = "the chart's own; to change it use Kustomize or a post-renderer"
# Variables of others, such as OTEL_EXPORTER_OTLP_ENDPOINT: not POI... Helm's expressions cannot say "but for".
OTHERS = "^([A-OQ-Z]|P([A-NP-Z]|O[A-HJ-Z]))[A-Z0-9_]*$"
# What reads the settings starts again when they change: require_keys would not hold otherwise.
POD = re.compile(r"^  template:\n    metadata:$", re.MULTILINE)
WITH_SETTINGS = r"""\g<0>
{{- with .Values.settings }}
      annotations:
        pointsman.io/settings: '{{ toJson . | sha256sum }}'
{{- end }}"""
REPLICAS = re.compile(r"^  replicas: .*$", re.MULTILINE)
# The component keda removes them from an object of the component vllm: the chart has both as values.
UNLESS_KEDA = r"""{{- if not .Values.keda }}
\g<0>
{{- end }}"""
# Of every pod, and of the accounts of the chart.
BEFORE_PULL_SECRETS = re.compile(r"^(?P<indent>      )containers:$|^kind: ServiceAccount$", re.MULTILINE)
PULL_SECRETS = """\
{{{{- if .Values.imagePullSecrets }}}}
{indent}imagePullSecrets:
{{{{- range .Values.imagePullSecrets }}}}
{indent}- name: {{{{ printf "%q" .name }}}}
{{{{- end }}}}
{{{{- end }}}}
{before}"""
HEAD = "{{/* Written by deploy/helm/generate.py (make manifests). */ -}}\n"
RULE_HEAD = "# Written by deploy/helm/generate.py (make manifests) from deploy/observability.\n"
SCHEMA_VERSION = "http://json-schema.org/draft-07/schema#"
ABSENT = object()
Key = tuple[str, str]


def written(kubectl: Path) -> dict[Path, str]:
    """Text by path of everything that is generated."""
    base = objects(kubectl, {"resources": ["base"]})
    variants = {value: objects(kubectl, kustomization) for value, kustomization in VALUES.items()}
    files = {PROMETHEUS_RULE: prometheus_rule(), SCHEMA: schema()}
    for key in sorted({key for found in (base, *variants.values()) for key in found}):
        if key[0] == "Namespace":
            continue  # helm makes it
        forms = {value: found.get(key, ABSENT) for value, found in variants.items()}
        original = base.get(key, ABSENT)
        example = next(form for form in (original, *forms.values()) if form is not ABSENT)
        path = TEMPLATES / f"{group(example)}.yaml"
        text = "".join(f"{line}\n" for line in entry([], original, forms, 0))
        if key[0] == "ConfigMap":
            text = SETTING.sub(UNLESS_SET, text)
        elif "name: pointsman-settings" in text:
            text = VARIABLE.sub(lambda one: one[0] if one["name"] in FIXED else one.expand(UNLESS_SET), text)
            if key[0] != "Job":  # that one cannot be changed
                text = POD.sub(WITH_SETTINGS, text)
        if key == ("ConfigMap", "pointsman-settings"):
            text = text.replace("data:\n", f"data:\n{SETTINGS}", 1)
        if key == ("Deployment", "pointsman-vllm"):
            text = REPLICAS.sub(UNLESS_KEDA, text)
        files[path] = files.get(path, HEAD) + BEFORE_PULL_SECRETS.sub(with_pull_secrets, text)
    return files


def objects(kubectl: Path, kustomization: dict[str, list[str]]) -> dict[Key, Any]:
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory).resolve()
        relative = {
            kind: [os.path.relpath(KUBERNETES / name, there) for name in names] for kind, names in kustomization.items()
        }
        (there / "kustomization.yaml").write_text(yaml.safe_dump({**relative, "namespace": NAMESPACE}))
        command = [kubectl, "kustomize", there]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(found["kind"], found["metadata"]["name"]): found for found in yaml.safe_load_all(text)}


def prometheus_rule() -> str:
    labels = {"app.kubernetes.io/name": "pointsman", "app.kubernetes.io/part-of": "pointsman"}
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pointsman", "labels": labels},
        "spec": {"groups": yaml.safe_load(RULES.read_text())["groups"] if RULES.exists() else []},
    }
    return RULE_HEAD + yaml.dump(rule, Dumper=Dumper, sort_keys=False, width=10_000)


def with_pull_secrets(found: re.Match[str]) -> str:
    return PULL_SECRETS.format(indent=found["indent"] or "", before=found[0])


def schema() -> str:
    """Of the values, for Helm, whose message quotes it: no other names, types as in values.yaml. `global` is Helm's own."""
    given = yaml.safe_load((HERE / "pointsman" / "values.yaml").read_text())
    found = {"$schema": SCHEMA_VERSION, **typed(given)}
    properties = found["properties"]
    properties["global"] = {}
    properties["settings"] = {
        "type": "object",
        "properties": variables() | {name: {"const": FIXED_REASON} for name in FIXED},
        "patternProperties": {OTHERS: {}},
        "additionalProperties": False,
    }
    properties["imagePullSecrets"]["items"] = {"type": "object", "required": ["name"]}
    return json.dumps(found, indent=2) + "\n"


def variables() -> dict[str, Any]:
    """Those that some process reads, with a value of any type."""
    known = json.loads(PROCESS_SETTINGS.read_text())
    names = {name for settings in known["tables"].values() for name in settings} | {"config"}
    names |= {f"{name}_file" for name in known["secrets"]}
    return {f"POINTSMAN_{name.upper()}": {} for name in sorted(names)}


def typed(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: typed(inner) for name, inner in value.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": {bool: "boolean", str: "string", list: "array"}[type(value)]}


def group(found: dict[str, Any]) -> str:
    """The template's file: one for each service, and for each kind of what belongs to none."""
    component = found["metadata"].get("labels", {}).get("app.kubernetes.io/component")
    own = found["metadata"]["name"].removeprefix("pointsman-")
    if found["apiVersion"].startswith("monitoring."):
        return "monitoring"
    return "network-policies" if found["kind"] == "NetworkPolicy" else component or own


def entry(path: list[str], base: Any, forms: dict[str, Any], indent: int) -> Iterator[str]:
    """Lines of one object, key or list element, whatever the values: `path` ends in its key, "" in an object's."""
    different = {value: form for value, form in forms.items() if form != base}
    if not different:
        yield from plain(path, base, indent)
    elif all(type(form) is type(base) and mergeable(base, form) for form in different.values()):
        yield from merged(path, base, different, indent)
    elif len(different) == 1:
        ((value, form),) = different.items()
        if form is ABSENT:
            yield f"{{{{- if not {value} }}}}"
            yield from plain(path, base, indent)
            yield "{{- end }}"
            return
        yield f"{{{{- if {value} }}}}"
        yield from plain(path, form, indent)
        if base is not ABSENT:
            yield "{{- else }}"
            yield from plain(path, base, indent)
        yield "{{- end }}"
    else:
        raise ValueError(f"{path}: changed by {list(different)} at once")


def mergeable(base: Any, form: Any) -> bool:
    """Whether the difference lies inside: elements of lists are matched by position, and their first key is no part of it."""
    if not isinstance(base, list):
        return isinstance(base, dict)
    if len(base) != len(form) or not all(isinstance(one, dict) for one in (*base, *form)):
        return False
    return all(one[min(one)] == other.get(min(one)) for one, other in zip(base, form, strict=True))


def merged(path: list[str], base: Any, forms: dict[str, Any], indent: int) -> Iterator[str]:
    if isinstance(base, dict):
        yield from opening(path, indent)
        inner = indent + (2 if path else 0)
        for key in sorted({key for one in (base, *forms.values()) for key in one}):
            parts = {value: form.get(key, ABSENT) for value, form in forms.items()}
            yield from entry([*path, key], base.get(key, ABSENT), parts, inner)
        return
    yield f"{' ' * indent}{path[-1]}:"
    for number, element in enumerate(base):
        lines = list(entry([], element, {value: form[number] for value, form in forms.items()}, indent + 2))[1:]
        yield f"{' ' * indent}- {lines[0].strip()}"
        yield from lines[1:]


def plain(path: list[str], found: Any, indent: int) -> Iterator[str]:
    if found is ABSENT:
        return
    content = {path[-1]: found} if path else found
    if not path:
        yield from opening(path, indent)
    text = yaml.dump(replaced(content), Dumper=Dumper, width=10_000, allow_unicode=True)
    yield from (f"{' ' * indent}{line}" if line else line for line in text.splitlines())


def opening(path: list[str], indent: int) -> Iterator[str]:
    yield f"{' ' * indent}{path[-1]}:" if path else "---"


def replaced(found: Any, key: str = "") -> Any:
    if isinstance(found, dict):
        return {name: replaced(value, name) for name, value in found.items()}
    if isinstance(found, list):
        return [replaced(element) for element in found]
    if not isinstance(found, str):
        return found
    if key in REPLACED_KEYS and REPLACED_KEYS[key][0] == found:
        return Quoted(REPLACED_KEYS[key][1])
    text = found.replace("{{", '{{ "{{" }}')
    for pattern, expression in REPLACED:
        text = pattern.sub(expression, text)
    return text if text == found else Quoted(text) if "\n" not in text else text


class Quoted(str):
    """Text with template actions: in quotes, so that YAML takes what comes out as text."""


class Dumper(yaml.SafeDumper):
    """Not SafeDumper itself: its way with text would change for everybody."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)
Dumper.add_representer(
    Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="'")
)


def main() -> None:
    kubectl = Path(sys.argv[1])
    PROMETHEUS_RULE.write_text(prometheus_rule())
    files = written(kubectl)
    for old in set(TEMPLATES.glob("*.yaml")) - set(files):
        old.unlink()
    for path, text in files.items():
        path.write_text(text)
    print(json.dumps({"templates": len(set(files) - {PROMETHEUS_RULE, SCHEMA})}))


if __name__ == "__main__":
    main()
