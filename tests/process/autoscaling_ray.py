"""A Ray head whose autoscaler starts and ends hosts as processes of this machine.

Ray's own `AutoscalingCluster` is no use here: it begins and ends with `ray stop --force`, which
ends every Ray of the machine.
"""

import json
import os
import sys
from pathlib import Path

from tests.process.program import Program

GCS_PORT = 26379
ADDRESS = f"127.0.0.1:{GCS_PORT}"


def autoscaling_head(folder: Path, ray_folder: Path, hosts_max: int) -> Program:
    """Start a head without room for workers; hosts with one CPU each join as they are wanted."""
    node = {"resources": {"CPU": 1, "object_store_memory": 80 << 20}, "node_config": {}}
    config = {
        "cluster_name": "disagg-test",
        "max_workers": hosts_max,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": ADDRESS,
            "disable_node_updaters": True,  # a host is a process here: nothing is set up in it
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "host": node | {"min_workers": 0, "max_workers": hosts_max},
        },
        "head_node_type": "ray.head.default",
        "head_node": {},
        "worker_nodes": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(config))
    return Program(
        "ray.scripts.scripts",
        *("start", "--head", "--block", f"--port={GCS_PORT}", "--num-cpus=0"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"),
        f"--object-store-memory={80 << 20}",
        f"--temp-dir={ray_folder}",
        f"--autoscaling-config={file}",
        cwd=folder,
        environment=os.environ
        | {
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "300",  # on a machine that is busy
            "RAY_enable_autoscaler_v2": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "200",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
    )
