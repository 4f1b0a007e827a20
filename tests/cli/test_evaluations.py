"""`rollout-buffer run evaluations`, against a real service."""

import json
import subprocess
import sys
from pathlib import Path

from rollout_buffer.v1 import evaluations_pb2
from tests.support.evaluations import EvaluatingWorker
from tests.support.rpc import connect, make_task
from tests.support.service import running_service


def listed(address: str, run_id: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "buffer_cli", "run", "evaluations", run_id, "--address", address, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "200", "NO_COLOR": "1"}
    )


def test_evaluations_are_listed_with_how_far_they_are_and_on_whom_they_wait(tmp_path: Path) -> None:
    with running_service(tmp_path / "service") as service:
        rpc = connect(service.address)
        run = rpc.create(batch_groups=2)
        assert "has no evaluation" in listed(service.address, run.run_id).stdout
        worker = EvaluatingWorker(rpc.channel, run.run_id)
        request = evaluations_pb2.SubmitEvaluationRequest(
            run=run.ref, term=1, eval_id="held-out", tasks=[make_task(), make_task(), make_task()]
        )
        worker.stub.SubmitEvaluation(request, timeout=20)
        worker.finish(worker.lease().leases[0])
        (row,) = [line for line in listed(service.address, run.run_id).stdout.splitlines() if "held-out" in line]
        assert [cell.strip() for cell in row.strip("│").split("│")][:7] == ["held-out", "1.0", "3", "2", "0", "1", "0"]
        (values,) = json.loads(listed(service.address, run.run_id, "--json").stdout)
        assert (values["finished"], values["waits_on"]) == (1, "a worker that evaluates, with weights 1.0")
        unknown = listed(service.address, "nowhere")
        assert unknown.returncode != 0
        assert "there is no run 'nowhere'" in unknown.stderr + unknown.stdout
        rpc.channel.close()
