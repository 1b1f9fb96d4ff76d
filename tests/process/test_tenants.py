"""Two tenants at a real router and real workers: equal prompts, and no block in common."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from disagg.router.keys import hash_of, new_key
from disagg.wire.v1 import router_pb2, router_pb2_grpc
from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, is_exact, is_reported

pytestmark = pytest.mark.timeout(600)

LENGTH, COMMON = 150, 144
"""A prompt and its last block end."""
SCOPES = {"alice": ["serve"], "bob": ["serve"], "ops": ["admin", "observe", "serve"]}


class Tenants:
    """A cluster whose router has keys; ``ops`` looks after it."""

    def __init__(self, cluster: Cluster, path: Path, keys: dict[str, str]) -> None:
        self.cluster, self.path, self.keys = cluster, path, keys
        self.served = ServedModel(cluster)

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.cluster.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=120
        )

    def found(self, tenant: str, expected: Any) -> tuple[int, str]:
        """Prompt tokens that a tenant's request found cached, and the blocks it pulled by group."""
        request_id = self.served.new_id()
        with self.client(tenant) as client:
            completion = client.completions.create(
                **self.served.body(expected), extra_headers={"X-Request-Id": request_id}
            )
        assert is_exact(lambda: completion, expected)
        url = f"/v1/disagg/requests/{request_id}?tenant={tenant}"

        def record() -> dict[str, Any] | None:
            body: dict[str, Any] = self.cluster.admin.get(url).json()
            return body if is_reported(body) else None

        (generation,) = wait_until(record, "the prefill's report")["generations"]
        self.served.settle()
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        hits: int = generation["hit_tokens"] + (generation["pulled_tokens"] or 0)
        assert completion.usage.prompt_tokens_details.cached_tokens == hits
        return hits, "".join(g["block_map"] for g in generation["transfer"]["groups"])

    def matched(self, tenant: str, prompt: tuple[int, ...]) -> int:
        """The longest prefix of a prompt that ``Match`` tells a tenant of."""
        metadata = (("authorization", f"Bearer {self.keys[tenant]}"),)
        with self.cluster.channel(self.cluster.grpc_address) as channel:
            answer = router_pb2_grpc.RouterStub(channel).Match(
                router_pb2.MatchRequest(model=MODEL, token_ids=prompt),
                metadata=metadata,
                timeout=WAIT_S,
            )
        return max(one.usable_tokens for one in answer.workers)


def write_keys(path: Path, keys: dict[str, str]) -> None:
    entries = [
        {"name": name, "tenant": name, "scopes": SCOPES[name], "sha256": hash_of(key)}
        for name, key in keys.items()
    ]
    path.write_text(json.dumps({"keys": entries}))


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    keys = {name: new_key() for name in SCOPES}
    path = folder / "keys.json"
    write_keys(path, keys)
    cluster = Cluster(
        model_dir,
        folder,
        {"max_step_tokens": 96},
        {"api_keys_file": str(path), "allow_unauthenticated": False},
        key=keys["ops"],
    )
    with running(cluster, p0="prefill", d0="decode"):
        yield Tenants(cluster, path, keys)


def test_equal_prompts_of_two_tenants_share_no_block(tenants: Tenants) -> None:
    """By what is found, held and told, not by what takes time."""
    served = tenants.served
    prompt = served.prompt(LENGTH, 6, salt="tenants")
    assert tenants.found("alice", prompt)[0] == 0
    num_cached = wait_until(served.num_cached, "alice's blocks in the router's index")
    assert tenants.matched("alice", prompt.prompt) == COMMON  # control
    assert tenants.matched("bob", prompt.prompt) == 0

    hits, blocks = tenants.found("bob", prompt)
    assert hits == 0
    assert "h" not in blocks  # nor at the decode worker
    wait_until(lambda: served.num_cached() == 2 * num_cached, "as many blocks of bob's own")

    # Control: a tenant finds its own, at both workers, and caches no more.
    for name in ("alice", "bob"):
        hits, blocks = tenants.found(name, prompt)
        assert hits == COMMON
        assert "h" in blocks
        assert tenants.matched(name, prompt.prompt) == COMMON
    assert served.num_cached() == 2 * num_cached


def test_what_a_tenant_may_is_asked_of_a_real_router(tenants: Tenants) -> None:
    cluster = tenants.cluster
    with httpx.Client(timeout=120) as stranger:
        assert stranger.get(f"{cluster.url}/ready").status_code == 200
        for url in (cluster.url, cluster.admin_url):
            assert stranger.get(f"{url}/metrics").status_code == 401
            assert stranger.post(f"{url}/v1/completions", json={}).status_code == 401
        alice = {"Authorization": f"Bearer {tenants.keys['alice']}"}
        for path in ("/metrics", "/v1/disagg/workers"):
            assert stranger.get(cluster.admin_url + path, headers=alice).status_code == 403
        assert (
            stranger.post(f"{cluster.admin_url}/reset_prefix_cache", headers=alice).status_code
            == 403
        )
    for name in SCOPES:
        with tenants.client(name) as client:
            assert [one.id for one in client.models.list()] == [MODEL]
    said = cluster.router.logged()
    assert said
    assert not any(
        secret in said for key in tenants.keys.values() for secret in (key, hash_of(key))
    )


def test_a_revoked_key_is_out_and_a_new_one_in_without_a_restart(tenants: Tenants) -> None:
    before, served = dict(tenants.keys), tenants.served
    prompt = served.prompt(LENGTH, 6, salt="rotated")
    assert tenants.found("alice", prompt)[0] == 0

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return tenants.cluster.http.get("/v1/models", headers=headers).status_code

    tenants.path.write_text("{")  # half a file takes nobody's key away
    wait_until(lambda: "stay in use" in tenants.cluster.router.logged(), "the error in the log")
    assert status(before["alice"]) == 200
    tenants.keys["alice"] = new_key()
    write_keys(tenants.path, tenants.keys)
    wait_until(lambda: status(before["alice"]) == 401, "the old key to be out")
    assert status(tenants.keys["alice"]) == 200
    assert status(before["bob"]) == 200
    assert tenants.found("alice", prompt)[0] == COMMON  # what it had computed is still alice's
    assert tenants.found("bob", prompt)[0] == 0


def test_a_worker_of_another_secret_serves_nobody(tenants: Tenants) -> None:
    cluster = tenants.cluster
    other = "the secret of a cluster that this one is not"
    cluster.spawn("x0", "both", hash_key=other)
    wait_until(lambda: "another secret" in cluster.router.logged(), "the refusal")
    assert "x0" not in cluster.known()
    wait_until(lambda: "another secret" in cluster.workers["x0"].logged(), "the worker to say so")
    for process in (cluster.router, cluster.workers["x0"]):
        assert other not in process.logged()
        assert "the secret of the clusters" not in process.logged()
    cluster.workers.pop("x0").end()
