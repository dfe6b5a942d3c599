"""The manifests of `deploy/kubernetes` against the schemas of KServe and KubeRay, and their commands against ours."""

import copy
import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from opal_deploy.cli import app

MANIFESTS = Path(__file__).parents[2] / "deploy/kubernetes"
NAMES = ("inferenceservice", "rayjob")


def read(name):
    manifest = yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8"))
    schema = json.loads((Path(__file__).parent / f"schemas/{name}.json").read_text(encoding="utf-8"))
    return manifest, jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_has_only_fields_that_its_resource_has(name):
    manifest, validator = read(name)
    validator.validate(manifest)
    changed = copy.deepcopy(manifest)
    changed["spec"]["noSuchField"] = "x"
    assert not validator.is_valid(changed)


def command_of(name):
    manifest, _ = read(name)
    if name == "rayjob":
        program, *arguments = shlex.split(manifest["spec"]["entrypoint"])
        assert program == "opal-deploy"
        return arguments
    arguments = manifest["spec"]["predictor"]["containers"][0]["args"]
    assert isinstance(arguments, list)
    return arguments


@pytest.mark.parametrize("name", NAMES)
def test_its_command_is_one_of_ours(name):
    command, *arguments = command_of(name)
    group = typer.main.get_command(app)
    # parses, and runs nothing
    context = group.commands[command].make_context(command, arguments)
    assert context.params


def test_probes_and_port_are_those_of_the_server():
    manifest, _ = read("inferenceservice")
    (container,) = manifest["spec"]["predictor"]["containers"]
    (port,) = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["containerPort"]
        assert container[probe]["httpGet"]["path"] in ("/v2/health/live", "/v2/health/ready")
    # time to leave in good order
    grace = manifest["spec"]["predictor"]["terminationGracePeriodSeconds"]
    options = ("--drain", "--upload-timeout", "--request-timeout")
    seconds = [int(argument.split("=")[1]) for argument in container["args"] if argument.startswith(options)]
    assert len(seconds) == len(options)
    assert grace > sum(seconds)
