"""Deployment files parse and hold commands that Plume reads; docs/serve.md has a row, with a test, for every limit."""

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from plume.cli.main import settings
from plume.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
INSTRUCTIONS = {
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "USER",
    "ENV",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}
NOT_LIMITS = {"models", "host", "port", "runs", "engine", "access_log", "telemetry"}


def config() -> ServeConfig:
    return settings(ServeConfig, [str(DEPLOY / "serve.toml")], "models")


def test_every_limit_has_a_row_with_a_test_that_is_there():
    table = PAGE.split("## Timeouts, limits and rules")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    options = {match for row in rows for match in re.findall(r"`(\w+)`", row[1])}
    assert {field.name for field in fields(ServeConfig)} - NOT_LIMITS <= options
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "serve").glob("test_*.py"))
    for row in rows:
        (name,) = re.findall(r"`(test_\w+)`", row[3])
        assert f"def {name}(" in sources, name


def test_every_file_is_linked_and_the_recipe_is_read():
    assert set(re.findall(r"\]\(deploy/([\w.]+)\)", PAGE)) == {path.name for path in DEPLOY.iterdir()}
    assert config().host == "0.0.0.0" and config().keys
    assert config().connections_per_address == config().connections  # all clients have the proxy's address


def test_the_container_starts_the_server_as_its_own_user():
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if line and line[0] != "#"]
    words = [line.split(" ", 1) for line in lines]
    assert {name for name, _ in words} <= INSTRUCTIONS and words[0][0] == "FROM"
    found = dict(words)
    assert json.loads(found["ENTRYPOINT"]) == ["plume", "serve"] and found["USER"] == "plume"
    assert json.loads(found["CMD"]) == ["/config/serve.toml"] and found["EXPOSE"] == str(config().port)
    compile(json.loads(found["HEALTHCHECK"].split("CMD ")[1])[2], "health check", "exec")
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.slow
def test_the_command_of_the_container_serves_and_stops(models, tmp_path):
    """With the recipe as it is but for the model, the port and the engine."""
    recipe = (DEPLOY / "serve.toml").read_text().replace("/models/demo", str(models["gpt"]))
    recipe = recipe.replace("port = 8000", "port = 0") + '[engine]\nengine = "torch"\n'
    (tmp_path / "serve.toml").write_text(recipe)
    lines = dict(line.split(" ", 1) for line in (DEPLOY / "Containerfile").read_text().splitlines() if line)
    program, *words = [*json.loads(lines["ENTRYPOINT"]), str(tmp_path / "serve.toml")]
    command = [sys.executable, "-m", program, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = next(found[1] for line in process.stderr if (found := re.search(r" at http://.*:(\d+)/", line)))
            check = json.loads(lines["HEALTHCHECK"].split("CMD ")[1])[2].replace("8000", port)
            subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_compose_mounts_what_the_container_reads():
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert (DEPLOY / services["plume"]["build"]["context"] / services["plume"]["build"]["dockerfile"]).is_file()
    mounts = dict(volume.split(":")[:2] for volume in services["plume"]["volumes"])
    assert mounts["./serve.toml"] == "/config/serve.toml" and "/models" in mounts.values()
    assert int(services["plume"]["stop_grace_period"].rstrip("s")) > config().shutdown_timeout
    proxy = (DEPLOY / "Caddyfile").read_text()
    assert proxy.count("{") == proxy.count("}") and f"plume:{config().port}" in proxy
    assert int(re.findall(r"read_timeout (\d+)s", proxy)[0]) > config().timeout


def test_systemd_units_name_the_command_and_the_socket():
    units = {}
    for name in ("plume.service", "plume.socket"):
        units[name] = configparser.ConfigParser(interpolation=None, strict=False)
        units[name].optionxform = str
        units[name].read(DEPLOY / name)
    service, listening = units["plume.service"], units["plume.socket"]
    command = shlex.split(service["Service"]["ExecStart"])
    assert command[0].endswith("/plume") and command[1] == "serve" and service["Unit"]["Requires"] == "plume.socket"
    assert int(service["Service"]["TimeoutStopSec"]) > ServeConfig(models=("x",)).shutdown_timeout
    assert listening["Socket"]["ListenStream"].endswith(f":{config().port}")


def test_kubernetes_probes_and_waits_for_streams():
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] > 1 and pod["terminationGracePeriodSeconds"] > config().shutdown_timeout + 5
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["ports"][0]["targetPort"] == config().port == container["ports"][0]["containerPort"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert container["args"] == ["/config/serve.toml"] and tomllib.loads((DEPLOY / "serve.toml").read_text())
