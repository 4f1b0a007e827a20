"""Service and worker from their images train a run, as the chart starts them: command line, user, read-only root."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.container import LAYOUT, command, rendered, running_container, terminate
from tests.support.processes import children
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task

pytestmark = [
    pytest.mark.skipif(LAYOUT not in os.environ, reason="no images are built: make test-images"),
    pytest.mark.timeout(300),
]
BATCH, STEPS = 2, 3
REWARDS = "def score(sample):\n    return float(sample.sample_index)\n"
WORKERS = {
    "security": {"insecure": True},
    "workers": [
        {
            "name": "sim",
            "run": "r",
            "codeConfigMap": "rewards",
            "options": {"reward": "rewards:score"},
            "engine": {"source": "simulate", "simulate": {"engines": 2, "length_median": 8}},
        }
    ],
}


def test_a_run_is_trained_by_containers_that_may_do_nothing_else(tmp_path: Path) -> None:
    tasks = (
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2])
        for i in range(BATCH * STEPS)
    )
    policy = Policy(batch_groups=BATCH, overflow_action="block")
    volumes = tmp_path / "worker"
    (volumes / "code").mkdir(parents=True)
    (volumes / "code/rewards.py").write_text(REWARDS)
    with running_container(tmp_path / "service") as service:
        started, environment = command(
            "worker", rendered(tmp_path, "worker", WORKERS), volumes, POD_NAME="sim-0", POD_IP="127.0.0.1"
        )
        with (tmp_path / "log").open("wb") as log:
            worker = subprocess.Popen(started, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            with (
                BufferClient(service.address, ClientOptions(timeout_s=120)) as client,
                client.session("r", policy=policy, tasks=tasks, options=SessionOptions(pull_timeout_s=120)) as session,
            ):
                rewards = []
                for batch in session:
                    rewards += [[sample.reward for sample in group.samples] for group in batch.groups]
                    session.publish()
                for pid in (service.pid, worker.pid):
                    check_confined(*children(pid))
                ledger = session.state().ledger
            terminate(worker.pid)
            assert worker.wait(60) == 0
        except BaseException:
            print((tmp_path / "log").read_text())
            raise
        finally:
            worker.kill()
            worker.wait()
        assert rewards == [[0.0, 1.0]] * BATCH * STEPS
        assert ledger.balanced
        assert service.stop() == 0
    for said in (service.log, tmp_path / "log"):
        assert "Read-only file system" not in said.read_text()


def check_confined(pid: int) -> None:
    """The process is the first of its namespace, of the chart's user, and can neither write nor become more."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NSpid"].split()[-1] == "1"
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    (root,) = [
        line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if line.split()[4] == "/"
    ]
    assert "ro" in root[5].split(",")
