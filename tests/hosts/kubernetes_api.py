"""The part of the Kubernetes API that Ray's autoscaler uses, over HTTPS: a RayCluster and its pods.

It refuses what a real one would: other paths, verbs that KubeRay's role does not have, who has no
token, content types, patches that do not apply, objects that do not fit the CRD.
"""

import copy
import json
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema

Manifest = dict[str, Any]

GROUP_DEFAULTS = {"replicas": 0, "minReplicas": 0, "maxReplicas": 2**31 - 1, "numOfHosts": 1}
"""Those of KubeRay's CRD."""
ROLE = {"pods": ("get", "list", "watch", "patch"), "rayclusters": ("get", "patch")}
"""What the operator lets the head's service account do."""
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
PATH = re.compile(
    r"/(?P<api>api/v1|apis/ray\.io/v1)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<kind>[^/]+)(/(?P<name>[^/]+))?"
)
KINDS = {"pods": "api/v1", "rayclusters": "apis/ray.io/v1"}


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Call:
    """What was asked, and how it was answered."""

    verb: str
    path: str
    status: int
    body: Any


class KubernetesApi:
    """Objects of one namespace, behind a lock; `serve` lets others reach them.

    Attributes:
        calls: what came over the network, in order.
    """

    def __init__(
        self, namespace: str, token: str, validate: Callable[[Manifest], None] = lambda _: None
    ) -> None:
        """A namespace without objects.

        Args:
            namespace: its name.
            token: of the one service account.
            validate: raises `jsonschema.ValidationError` for a RayCluster that does not fit.
        """
        self.calls: list[Call] = []
        self._namespace = namespace
        self._token = token
        self._validate = validate
        self._lock = threading.RLock()
        self._version = 1000
        self._objects: dict[str, dict[str, Manifest]] = {kind: {} for kind in KINDS}

    # For the operator, the kubelet and the one who runs kubectl

    def get(self, kind: str, name: str) -> Manifest:
        """A copy of an object.

        Raises:
            RefusedError: there is none.
        """
        with self._lock:
            if name not in self._objects[kind]:
                raise RefusedError(404, f'{kind} "{name}" not found')
            return copy.deepcopy(self._objects[kind][name])

    def find_all(self, kind: str) -> list[Manifest]:
        """Copies of all objects of a kind."""
        with self._lock:
            return copy.deepcopy([*self._objects[kind].values()])

    def put(self, kind: str, given: Manifest) -> None:
        """Create an object, or replace it.

        Raises:
            RefusedError: it does not fit its schema.
        """
        with self._lock:
            made = copy.deepcopy(given)
            made["metadata"]["namespace"] = self._namespace
            if kind == "rayclusters":
                for group in made["spec"]["workerGroupSpecs"]:
                    group |= {name: v for name, v in GROUP_DEFAULTS.items() if name not in group}
                try:
                    self._validate(made)
                except jsonschema.ValidationError as error:
                    raise RefusedError(422, f"{error.json_path}: {error.message}") from None
            self._version += 1
            made["metadata"]["resourceVersion"] = str(self._version)
            self._objects[kind][made["metadata"]["name"]] = made

    def change(self, kind: str, name: str, edit: Callable[[Manifest], Any]) -> None:
        """Edit an object in place; one that has gone is left alone."""
        with self._lock:
            if name in self._objects[kind]:
                edited = self.get(kind, name)
                edit(edited)
                self.put(kind, edited)

    def remove(self, kind: str, name: str) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            self._version += 1
            self._objects[kind].pop(name, None)

    # For those who call

    def answer(self, method: str, url: str, headers: dict[str, str], body: bytes) -> Manifest:
        """What a request gets.

        Raises:
            RefusedError: it is not granted.
        """
        if headers.get("authorization") != f"Bearer {self._token}":
            raise RefusedError(401, "Unauthorized")
        parts = urlsplit(url)
        found = PATH.fullmatch(parts.path)
        if found is None or KINDS.get(found["kind"]) != found["api"]:
            raise RefusedError(404, "the server could not find the requested resource")
        kind, name = found["kind"], found["name"]
        verb = {"GET": "get" if name else "list"}.get(method, method.lower())
        if verb not in ROLE[kind] or found["namespace"] != self._namespace:
            raise RefusedError(403, f"cannot {verb} resource {kind} in {found['namespace']}")
        if verb == "list":
            return self._listed(kind, parse_qs(parts.query, strict_parsing=True))
        if verb == "get":
            return self.get(kind, name)
        return self._patched(kind, name, headers.get("content-type", ""), body)

    def _listed(self, kind: str, query: dict[str, list[str]]) -> Manifest:
        given = {name: values[0] for name, values in query.items()}
        selector = given.pop("labelSelector", "")
        match = given.pop("resourceVersionMatch", "")
        version = given.pop("resourceVersion", "")
        if given or (match and match != "NotOlderThan") or (match and not version):
            raise RefusedError(400, f"parameters: {query}")
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        with self._lock:
            if version and int(version) > self._version:
                raise RefusedError(504, f"Too large resource version: {version}")
            items = [
                one
                for one in self.find_all(kind)
                if wanted.items() <= one["metadata"].get("labels", {}).items()
            ]
            return {"metadata": {"resourceVersion": str(self._version)}, "items": items}

    def _patched(self, kind: str, name: str, content_type: str, body: bytes) -> Manifest:
        with self._lock:
            before = self.get(kind, name)
            try:
                patch = json.loads(body)
            except ValueError as error:
                raise RefusedError(400, str(error)) from None
            if content_type == JSON_PATCH:
                after = apply_json_patch(before, patch)
            elif content_type == MERGE_PATCH:
                after = _merge(before, patch)
            else:
                raise RefusedError(415, f"content type {content_type} for a custom resource")
            if after["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
                raise RefusedError(409, "the object has been modified")
            if kind == "rayclusters":
                after.pop("status", None)  # a resource of its own
                after |= {"status": before["status"]} if "status" in before else {}
            self.put(kind, after)
            return self.get(kind, name)


def apply_json_patch(given: Manifest, patch: Any) -> Manifest:
    """RFC 6902, as Kubernetes reads it: `replace` also makes a member that an object lacks.

    So does the library that its API server uses (evanphx/json-patch, version 4).

    Raises:
        RefusedError: it does not apply.
    """
    made = copy.deepcopy(given)
    if not isinstance(patch, list):
        raise RefusedError(400, "a JSON patch is a list")
    for one in patch:
        operation, path = one["op"], one["path"]
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")][
            1:
        ]
        try:
            place: Any = made
            for part in parents:
                place = place[int(part) if isinstance(place, list) else part]
            key = int(last) if isinstance(place, list) and last != "-" else last
            if operation == "test":
                if place[key] != one["value"]:
                    raise RefusedError(422, f"testing value {path} failed")
            elif operation == "replace":
                if isinstance(place, list):
                    place[key]
                place[key] = one["value"]
            elif operation == "add" and isinstance(place, list):
                place.insert(len(place) if key == "-" else key, one["value"])
            elif operation == "add":
                place[key] = one["value"]
            else:
                raise RefusedError(422, f"operation {operation}")
        except (KeyError, IndexError, TypeError, ValueError):
            raise RefusedError(422, f"{operation} does not apply: {path}") from None
    return made


def _merge(given: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    made = dict(given) if isinstance(given, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = _merge(made.get(name), value)
    return made


class ApiServer:
    """Serves the API until it is ended."""

    def __init__(self, api: KubernetesApi, address: str, certificate: Path, key: Path) -> None:
        """Listen on a port of its own, in the network of the thread that calls this."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                try:
                    status, said = 200, api.answer(self.command, self.path, headers, body)
                except RefusedError as error:
                    status = error.status
                    said = {"kind": "Status", "code": status, "message": error.message}
                seen = json.loads(body) if body and status != 400 else None
                api.calls.append(Call(self.command, self.path, status, seen))
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _do

            def log_message(self, format: str, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
