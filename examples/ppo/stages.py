"""`python -m examples.ppo.stages NAME ADDRESS RUN FOLDER`: a worker of a stage, `reference` or `values`.

Each is a process of its own, and could be on a machine of its own. The reference is the policy as it was at first. The
critic is trained by the trainer, which leaves its newest weights in FOLDER; its version is the step that made them.
"""

import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from examples.demo.model import load_model
from examples.ppo.critic import Critic
from trainer_client.batch import Group
from trainer_client.objectives import selected_logprobs
from trainer_client.stages import Added, Stage
from trainer_client.stages.columns import Arrays
from trainer_client.stages.stage import Make

CRITIC = "critic-*.safetensors"


def reference(folder: Path) -> Make:
    """Make the function that adds log-probabilities of the first policy."""
    model = load_model(folder / "model")

    @torch.no_grad()
    def logprobs(group: Group) -> Added:
        token_ids = _padded(group)
        return Added(
            tokens={"reference_logprobs": _cut(selected_logprobs(model(input_ids=token_ids).logits, token_ids), group)}
        )

    return logprobs


def values(folder: Path) -> Make:
    """Make the function that adds the values of the newest critic."""
    critic, version = Critic(load_model(folder / "model")), -1

    @torch.no_grad()
    def estimates(group: Group) -> Added:
        nonlocal version
        newest = max(int(path.stem.rpartition("-")[2]) for path in folder.glob(CRITIC))
        if newest > version:
            critic.load(folder / f"critic-{newest}.safetensors")
            version = newest
        return Added(tokens={"values": _cut(critic(_padded(group)), group)}, version=version)

    return estimates


def _padded(group: Group) -> Tensor:
    rows = [torch.from_numpy(sample.token_ids.astype("int64")) for sample in group.samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _cut(per_token: Tensor, group: Group) -> Arrays:
    return [row[: sample.tokens].float().numpy() for row, sample in zip(per_token, group.samples, strict=True)]


def main(name: str, address: str, run_id: str, folder: str) -> None:
    """Serve a stage until SIGTERM."""
    torch.set_num_threads(1)
    make = {"reference": reference, "values": values}[name](Path(folder))
    with Stage(address, run_id, name, groups=8) as stage:
        signal.signal(signal.SIGTERM, lambda *_: stage.stop())
        stage.serve(make)


if __name__ == "__main__":
    main(*sys.argv[1:])
