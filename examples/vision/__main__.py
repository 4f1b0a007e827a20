"""`python -m examples.vision`: a small vision model learns to name the colour of images, with SGLang.

Images are blobs of the run: each is written once, however many groups are made of it, and no group carries its bytes.
"""

import argparse
import io
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, Glm4vForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from examples.demo.processes import service, sglang, worker
from examples.vision.model import COLOURS, IDS, IMAGE, build_model, build_tokenizer, save
from trainer_client import BufferClient, ImageRef, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch
from trainer_client.collate import collate
from trainer_client.collate.images import ImageInputs, Processor, processor_of, reader
from trainer_client.objectives import policy_gradient_loss, selected_logprobs, tis_weights
from trainer_client.publish import FilesPublisher

RUN_ID = "vision"
POLICY = Policy(batch_groups=16, max_queued_groups=16, max_staleness=2)


@dataclass(frozen=True)
class Picture:
    """An image, and the colour that it shows."""

    data: bytes
    colour: str


def pictures(count: int, seed: int) -> list[Picture]:
    """Images of 56 x 56 pixels, each of one colour in shades of its own, with noise."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        colour = list(COLOURS)[i % len(COLOURS)]
        pixels = np.array(COLOURS[colour]) + rng.integers(-25, 26, 3) + rng.integers(-20, 21, (56, 56, 3))
        out = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "PNG")
        made.append(Picture(out.getvalue(), colour))
    return made


def prompt_of(picture: Picture, process: Processor) -> tuple[list[int], ImageRef]:
    """Token ids of the question, with as many placeholders as the processor says, and the image in its place."""
    content = [{"type": "image"}, {"type": "text", "text": "which colour?"}]
    messages: Any = [{"role": "user", "content": content}]
    ids: Any = build_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=False)
    tokens = int(process(picture.data)["image_grid_thw"].prod()) // 4  # two by two patches are a token
    start = ids.index(IMAGE)
    return [*ids[:start], *[IMAGE] * tokens, *ids[start + 1 :]], ImageRef.of(picture.data, start=start, tokens=tokens)


def tasks(of: Sequence[Picture], process: Processor) -> Iterator[Task]:
    """A task for one picture after the other, without end."""
    prompts = [(*prompt_of(picture, process), IDS[picture.colour]) for picture in of]
    for ids, image, answer in itertools.cycle(prompts):
        yield Task(
            prompt_token_ids=ids,
            images=[image],
            group_size=8,
            sampling=SamplingParams(max_new_tokens=1),
            metadata={"answer": answer},
        )


def warm_up(model: Glm4vForConditionalGeneration, of: Sequence[Picture], process: Processor, steps: int = 40) -> None:
    """Teach it to answer with a colour, any of them: which one is left to the rewards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = random.Random(0)
    for _ in range(steps):
        chosen = [draw.choice(of) for _ in range(16)]
        made = [process(picture.data) for picture in chosen]
        ids = torch.tensor([prompt_of(picture, process)[0] for picture in chosen])
        inputs = {name: torch.cat([each[name] for each in made]) for name in made[0]}
        logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **inputs).logits[:, -1]
        targets = torch.tensor([IDS[draw.choice(list(COLOURS))] for _ in chosen])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def train_step(
    model: Glm4vForConditionalGeneration, optimizer: torch.optim.Optimizer, pulled: Batch, inputs: ImageInputs
) -> dict[str, float]:
    """One optimizer step; the share of right answers, and how far its log-probabilities are from the engine's."""
    rewards = torch.tensor(np.concatenate([group.rewards - group.rewards.mean() for group in pulled.groups]))
    batch = collate(pulled, advantages=rewards)
    logits = model(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask, **inputs(batch, pulled.groups)
    ).logits
    logprobs = selected_logprobs(logits, batch.token_ids)
    assert batch.advantages is not None  # noqa: S101 - they were given
    loss = policy_gradient_loss(
        logprobs,
        batch.advantages,
        batch.loss_mask,
        weights=tis_weights(logprobs.detach(), batch.logprobs, batch.loss_mask, cap=2.0),
        loss_tokens=batch.total_loss_tokens,
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    apart = (logprobs.detach() - batch.logprobs)[batch.loss_mask & (batch.versions == pulled.info.train_version)]
    return {"right": batch.rewards.mean().item(), "apart": apart.abs().max().item() if len(apart) else float("nan")}


def train(
    model: Glm4vForConditionalGeneration, address: str, scratch: Path, steps: int, process: Processor
) -> Iterator[dict[str, float]]:
    """Figures of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with (
        BufferClient(address) as client,
        FilesPublisher(scratch / "weights") as publisher,
        client.session(
            RUN_ID,
            policy=POLICY,
            tasks=tasks(pictures(64, seed=1), process),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0),
        ) as session,
    ):
        inputs = ImageInputs(reader(client, RUN_ID), process)
        for pulled in itertools.islice(session, steps):
            yield train_step(model, optimizer, pulled, inputs)
            session.publish(model.save_pretrained)
            session.checkpoint()  # nothing is resumed here: what the steps so far had is let go


def main(argv: list[str] | None = None) -> int:
    """Print a line for every fifth step; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.vision", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="vision-") as directory:
        scratch = Path(directory)
        model = build_model(1)
        save(model, scratch / "model")
        process = processor_of(AutoImageProcessor.from_pretrained(scratch / "model"))  # type: ignore[no-untyped-call]
        warm_up(model, pictures(16, seed=2), process)
        save(model, scratch / "model")
        reward = ("--reward", "examples.vision.reward:reward")
        engine = sglang(scratch / "model", options.sglang_python, "--dtype=float32")
        with service(scratch / "service") as (_, address, _), worker(address, RUN_ID, scratch, *reward, *engine):
            print(f"{'step':>5} {'right':>6} {'|trainer - engine| in log-probability':>38}")
            for step, row in enumerate(train(model, address, scratch, options.steps, process)):
                if step == 0 or step % 5 == 4:
                    apart = "no token" if np.isnan(row["apart"]) else f"{row['apart']:.2g}"
                    print(f"{step:>5} {row['right']:>6.3f} {apart:>38}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
