"""The files of `deploy/` say what the server has: its flags, its metrics, its routes.

`make files` lints them by kind. No image is built and no cluster is started here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from manyroots.api.middleware import OPEN_PATHS
from manyroots.cli.main import _parse
from manyroots.ids import AdapterName, RequestId, Tier
from manyroots.messages import LoadTime, Stats, StorageStats
from manyroots.observe.metrics import Metrics
from manyroots.server_config import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "manyroots.json"
KUBERNETES = DEPLOY / "kubernetes" / "manyroots.yaml"
UNIT = DEPLOY / "systemd" / "manyroots.service"
METRIC = re.compile(r"\b(?:vllm|manyroots):\w+")


def shown_metrics() -> dict[str, set[str]]:
    """Every name in `/metrics` and its labels, of a server with adapters and storage."""
    storage = StorageStats(**dict.fromkeys(StorageStats.__dataclass_fields__, 0))
    stats = Stats(1, 0, 8, 4, 2, 2, 0, 100, 40, 7, 70, storage=storage)
    metrics = Metrics("tiny", lambda: stats, max_loras=1)
    sequence = metrics.sequence(RequestId(0), 5, AdapterName("pirate"))
    sequence.begin()
    sequence.tokens(1)
    sequence.tokens(1)
    sequence.finish("stop")
    load: dict[str, Any] = {"source": Tier.STORAGE, "target": Tier.DEVICE, "seconds": 0.1}
    metrics.loaded(LoadTime(**load, is_good=True))
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_every_metric_and_label_of_the_dashboard_exists() -> None:
    known = shown_metrics()
    asked = list(expressions())
    assert len(asked) > 20
    for expression in asked:
        names = METRIC.findall(expression)
        assert names, expression
        assert set(names) <= set(known), expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            assert set(labels.split(", ")) <= known[names[0]], expression


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)


def container() -> dict[str, Any]:
    [deployment] = [
        part for part in yaml.safe_load_all(KUBERNETES.read_text()) if part["kind"] == "Deployment"
    ]
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return {**found, "grace_s": deployment["spec"]["template"]["spec"]}


def entrypoint(dockerfile: str) -> list[str]:
    [line] = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / dockerfile).read_text(), re.MULTILINE)
    return json.loads(line)  # type: ignore[no-any-return]


def compose_server() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found["manyroots"]  # type: ignore[no-any-return]


def test_the_server_takes_the_flags_of_every_file() -> None:
    [start] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    cpu, cuda = entrypoint("Dockerfile.cpu"), entrypoint("Dockerfile.cuda")
    for words in (
        shlex.split(start),
        [*cpu, *compose_server()["command"]],
        [*cuda, *container()["args"]],
    ):
        assert Path(words[0]).name == "manyroots"
        _parse(words[1:])


def test_probes_ask_routes_that_need_no_key() -> None:
    probed = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")}
    assert probed == {"/live", "/ready"}
    assert probed <= OPEN_PATHS
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        assert "http://127.0.0.1:8000/live" in (DEPLOY / name).read_text()


def test_every_file_waits_longer_than_the_server_drains() -> None:
    drain_s = ServerSettings().drain_timeout_s
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    found = container()
    pause_s = int(found["lifecycle"]["preStop"]["exec"]["command"][1])
    assert int(stop) > drain_s
    assert int(compose_server()["stop_grace_period"].removesuffix("s")) > drain_s
    assert found["grace_s"]["terminationGracePeriodSeconds"] > drain_s + pause_s


def test_a_server_with_a_key_is_scraped_with_it() -> None:
    def job(name: str) -> dict[str, Any]:
        [found] = yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["scrape_configs"]
        return dict(found)

    assert "/metrics" in OPEN_PATHS
    assert "metrics_key" in ServerSettings.__dataclass_fields__
    assert "authorization" not in job("prometheus.yml")
    assert job("prometheus-with-key.yml")["authorization"]["type"] == "Bearer"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    # The command is not installed there on this machine, and systemd looks for it.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/manyroots/bin/manyroots", shutil.which("true")))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    about = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not about
    assert done.returncode == 0, done.stderr


def pool_parts() -> dict[str, dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / "inference-pool.yaml").read_text()
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def test_m05_the_inference_pool_selects_the_servers_and_their_port() -> None:
    """M05: fields and limits as the pool's API describes them; Kubernetes' schemas have none."""
    parts = pool_parts()
    pod = parts["Deployment"]["spec"]["template"]
    [server] = pod["spec"]["containers"]
    spec = parts["InferencePool"]["spec"]
    assert parts["InferencePool"]["apiVersion"] == "inference.networking.k8s.io/v1"
    assert spec["selector"] == {"matchLabels": pod["metadata"]["labels"]}
    assert spec["targetPorts"] == [{"number": server["ports"][0]["containerPort"]}]
    assert set(spec["endpointPickerRef"]) == {"name", "port"}
    _parse([*entrypoint("Dockerfile.cuda")[1:], *server["args"], "--admin-key", "from-the-secret"])
    drain_s = ServerSettings().drain_timeout_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain_s


def test_m05_the_adapter_syncer_is_given_adapters_that_the_server_may_read_and_its_key() -> None:
    parts = pool_parts()
    config = yaml.safe_load(parts["ConfigMap"]["data"]["configmap.yaml"])["vLLMLoRAConfig"]
    [server] = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    [folder] = [arg.partition("=")[2] for arg in server["args"] if arg.startswith("--lora-dirs")]
    for model in config["ensureExist"]["models"]:
        assert model["source"].startswith(f"{folder}/")
    secret = parts["Secret"]["stringData"]
    assert f"password {secret['admin-key']}" in secret["netrc"]
