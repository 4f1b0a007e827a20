"""Service and worker run where nothing can be written but what the chart mounts: a read-only root file system.

In a mount namespace of their own, which needs util-linux's unshare, and root or user namespaces.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chart.helm import VALUE_SETS, environment, pods_of
from tests.support.service import ServiceProcess
from tests.support.store_server import StoreServer
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task

pytestmark = pytest.mark.timeout(300)

BATCH, STEPS = 2, 3

READ_ONLY = """
import os, subprocess, sys
end = sys.argv.index("--")
volumes, command = sys.argv[1:end], sys.argv[end + 1:]
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
for volume in volumes:
    subprocess.run(["mount", "--bind", volume, volume], check=True)
for line in open("/proc/self/mountinfo").read().splitlines():
    at, kind = line.split()[4], line.split(" - ")[1].split()[0]
    if at not in volumes and kind not in {"proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2"}:
        subprocess.run(["mount", "-o", "remount,bind,ro", at], capture_output=True)
for forbidden in ("/", os.path.dirname(volumes[0])):
    if os.access(forbidden, os.W_OK):
        sys.exit(f"{forbidden} can be written")
os.execvp(command[0], command)
"""


def within(*volumes: Path) -> list[str]:
    """The beginning of a command that can write to these folders alone."""
    for volume in volumes:
        volume.mkdir(parents=True, exist_ok=True)
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *user, sys.executable, "-c", READ_ONLY, *map(str, volumes), "--"]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    tried = ["unshare", "--mount", *user, "mount", "--make-rprivate", "/"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mount namespaces need root, or user namespaces that it may make")
def test_service_and_worker_write_to_their_volumes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # /tmp is read-only too, so this stands for the volume that pods have there.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "tmp"))
    tasks = (
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2])
        for i in range(BATCH * STEPS)
    )
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(StoreServer())
        settings = {"rpc_processes": 1, "drain_grace_s": 1, "store": store.url}
        volumes = (tmp_path / "service/data", tmp_path / "tmp")
        service = ServiceProcess(volumes[0], settings, within=within(*volumes))
        service.start()
        stack.callback(service.kill)
        worker_folder = tmp_path / "worker"
        writable = within(worker_folder / "weights", tmp_path / "tmp")
        worker = stack.enter_context(
            worker_process(service.address, "r", worker_folder, "--simulate", "--engines", "2", within=writable)
        )
        client = stack.enter_context(BufferClient(service.address, ClientOptions(timeout_s=120)))
        session = stack.enter_context(
            client.session(
                "r",
                policy=Policy(batch_groups=BATCH, overflow_action="block"),
                tasks=tasks,
                options=SessionOptions(pull_timeout_s=120),
            )
        )
        for _ in session:
            session.publish()
        assert session.next_step == STEPS
        assert service.metric("rollout_buffer_rpc_seconds_count", method="PullBatch") > 0, "metrics are files"
        assert worker.stop() == 0
        assert service.stop() == 0
        for said in (worker.said(), service.log.read_text()):
            assert "Read-only file system" not in said


def test_what_programs_write_to_is_a_volume_in_every_pod() -> None:
    for values in VALUE_SETS:
        for component, paths in (("service", {"RB_DATA_DIR"}), ("worker", {"HOME"}), ("test", {"HOME"})):
            for pod in pods_of(values, component):
                for container in pod.containers:
                    mounts = {
                        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly", False)
                    }
                    written = {environment(container)[name] for name in paths} | {"/tmp"}
                    assert written <= mounts, (values.name, pod.name, container["name"])
