"""Ray and `disagg serve` on hosts, started by their own commands as a system's supervisor would."""

from tests.hosts.fleet import Fleet
from tests.hosts.hosts import Host

PORT, REDIS_PORT = 6379, 6390
RAY = (
    "PATH=$HOME/disagg-env/bin:$PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
    " RAY_worker_niceness=0 RAY_enable_autoscaler_v2=0"
)
OF_RAY = "[g]cs_server|[r]aylet/|python[0-9.]* [^ ]*ray start"
"""What Ray runs; no shell that starts it."""


def copy_secrets(fleet: Fleet) -> None:
    """Give every host the laptop's settings and secrets, as cluster.yaml does."""
    for host in fleet.hosts:
        to = f"{host.name}:"
        fleet.do(
            "S='ssh -o StrictHostKeyChecking=no'; R=\"rsync -a --rsh='$S'\";"
            f" $S {host.name} mkdir -p .ray; eval $R .ray/auth_token {to}.ray/;"
            f" eval $R disagg.yaml disagg-keys.json disagg-hash-key {to};"
            f" eval $R certificates/node/ {to}disagg-certificates"
        )


def start(host: Host, command: str, log: str, environment: str = "") -> None:
    """Start what stays."""
    host.run(f"{RAY} {environment} setsid nohup {command} >> ~/{log} 2>&1 < /dev/null &")


def start_redis(host: Host) -> str:
    """Start Redis; the variable by which Ray's head keeps its state there."""
    redis = f"redis-server --port {REDIS_PORT} --bind 0.0.0.0 --protected-mode no --save ''"
    start(host, redis, "redis.log")
    return f"RAY_REDIS_ADDRESS={host.address}:{REDIS_PORT}"


def start_head(host: Host, environment: str = "", *more: str) -> None:
    """Start Ray's head."""
    role = " ".join(("--head", f"--port={PORT}", "--include-dashboard=false", *more))
    start(host, _ray_start(host, role), "disagg-ray.log", environment)


def join(host: Host, head: str) -> None:
    """Start Ray on a host that joins a head, by address or name."""
    start(host, _ray_start(host, f"--address={head}:{PORT}"), "disagg-ray.log")


def join_again_and_again(host: Host, head: str, environment: str = "") -> None:
    """The same, and start it again whenever it has ended."""
    command = _ray_start(host, f"--address={head}:{PORT}")
    start(host, f"sh -c 'while :; do {command}; sleep 2; done'", "disagg-ray.log", environment)


def serve(host: Host, environment: str = "") -> None:
    """Start `disagg serve`."""
    start(host, "disagg serve --config disagg.yaml", "disagg.log", environment)


def kill_ray(host: Host) -> None:
    """Kill all that Ray runs there."""
    pids = host.run(f"pgrep -f '{OF_RAY}'").stdout.split()
    host.run(f"kill -KILL {' '.join(pids)}", check=False)


def _ray_start(host: Host, role: str) -> str:
    return f"ray start --block --node-ip-address={host.address} {role}"
