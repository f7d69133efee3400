"""An API server for Helm: kmock's, and what Helm asks of a server beyond that."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml

kmock = pytest.importorskip("kmock", reason="no API server: pip install 'tandem-serve[k8s-dev]'")

Manifest = dict[str, Any]


class FakeKubernetes(kmock.KubernetesEmulator):  # type: ignore[misc]
    """Objects in memory; server-side apply makes what is not there yet, a scale is of the replicas alone."""

    url = ""
    forbidden = ""  # the kind of object, in the plural, or the name of one, that nobody may change

    async def _handle(self, request: Any) -> Any:
        if request.action == kmock.action.UPDATE and self.forbidden in (request.resource.plural, request.name):
            raise kmock.KubernetesError(status=403, reason="Forbidden", message="forbidden", details={})
        if request.action == kmock.action.UPDATE and "apply-patch" in request.headers.get("Content-Type", ""):
            key = (request.resource, request.namespace, request.name)
            if key not in self.objects or self.objects[key].deleted:
                self.objects[key] = request.data
        if request.action == kmock.action.UPDATE and request.subresource == "scale":
            assert request.data.pop("kind") == "Scale" and request.data.pop("apiVersion") == "autoscaling/v1"
        return await super()._handle(request)

    def existing(self) -> dict[tuple[str, str], Manifest]:
        """What is there now, by kind and name."""
        alive = [self.objects[key].last.raw for key in self.objects if not self.objects[key].deleted]
        return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in alive}

    def kubeconfig(self) -> str:
        """How clients get here."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                "users": [{"name": "fake", "user": {}}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "llm"}}],
            }
        )


@asynccontextmanager
async def fake_kubernetes(version: str = "1.33.1") -> AsyncIterator[FakeKubernetes]:
    """A server that listens on loopback."""
    server = FakeKubernetes()
    server.resources.load_bundled()
    kinds = [(resource, server.resources[resource]) for resource in server.resources]
    server["get /version"] << {"major": "1", "minor": version.split(".")[1], "gitVersion": f"v{version}"}
    server["get /api/v1"] << {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {"name": resource.plural, "kind": info.kind, "namespaced": info.namespaced, "verbs": sorted(info.verbs)}
            for resource, info in kinds
            if not resource.group
        ],
    }
    # Helm sends manifests to a server that says it checks fields, and downloads schemas from any other.
    checked: dict[str, dict[str, Any]] = defaultdict(dict)
    for resource, info in kinds:
        base = f"apis/{resource.group}/{resource.version}" if resource.group else f"api/{resource.version}"
        checked[base][f"/{base}/namespaces/{{namespace}}/{resource.plural}/{{name}}"] = {
            "patch": {
                "responses": {},
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "x-kubernetes-group-version-kind": {
                    "group": resource.group,
                    "version": resource.version,
                    "kind": info.kind,
                },
            }
        }
    server["get /openapi/v3"] << {"paths": {base: {"serverRelativeURL": f"/openapi/v3/{base}"} for base in checked}}
    for base, paths in checked.items():
        document = {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
        server[f"get /openapi/v3/{base}"] << document
    async with server, kmock.Server(server) as listening:
        server.url = str(listening.url)
        yield server
