"""The cluster of deploy/compose: services, files, networks and commands that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spdist.cli import entry

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def test_services_name_each_other_and_what_is_there(compose):
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
        assert set(service["networks"]) <= compose["networks"].keys()
        assert service["image"].rpartition(":")[2] not in ("", "latest", service["image"])
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).exists()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    conditions = {
        (name, condition["condition"])
        for service in services.values()
        for name, condition in service.get("depends_on", {}).items()
    }
    assert all("healthcheck" in services[name] for name, condition in conditions if condition == "service_healthy")


def test_targets_are_services(compose):
    services = compose["services"]
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]
    source = yaml.safe_load((FOLDER / "grafana.yaml").read_text())["datasources"][0]["url"]
    told = services["worker"]["command"][1]
    store = services["worker"]["environment"]["AWS_ENDPOINT_URL"]
    for address in (*scraped["targets"], source, told, store):
        assert address.rpartition("/")[2].split(":")[0] in services
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yaml").read_text())["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])


def test_its_commands_are_ours(compose):
    lines = (FOLDER / "compose.yaml").read_text().replace("\\\n#", "").splitlines()
    commands = [line.partition("--rm spdist ")[2].split() for line in lines if "--rm spdist " in line]
    assert [command[0] for command in commands] == ["generate", "multiply"]
    for command in commands:
        entry._parser(command[0]).parse_args(command)
