"""The episode as an agent is given it: what is to be done, and where the model is."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_workers.agents.server import MODEL, Place
from rollout_workers.generation.prompts import messages_of

if TYPE_CHECKING:
    from rollout_buffer.v1 import tasks_pb2
    from rollout_workers.episode import Episode

_TAIL = 500
"""Characters of a failed program's errors that are shown."""

# Becomes the program that follows, after it has asked the kernel to be killed when its parent ends (prctl 1 is
# PR_SET_PDEATHSIG): a worker that is killed leaves no agent behind.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot be started: {error}")
"""


class AgentEpisode:
    """Sample of a group that an agent makes, by requests to a model of its own."""

    def __init__(self, episode: "Episode", place: Place) -> None:
        self.task: tasks_pb2.Task = episode.task
        """The task as it was submitted."""
        self.metadata: Mapping[str, Any] = json.loads(self.task.metadata_json or "{}")
        """The task's metadata, a JSON object."""
        self.environment: str = self.task.environment
        """The task's environment."""
        self.messages = messages_of(self.task)
        """The task's messages, to begin with where the agent brings none of its own."""
        self.sample_index = episode.sample_index
        """Place of the sample in its group, from 0."""
        self.base_url = f"{place.url}/v1"
        """Base URL as OpenAI's clients have it."""
        self.anthropic_url = place.url
        """Base URL as Anthropic's clients have it."""
        self.api_key = place.token
        """Key, worth something until the agent returns."""
        self.model = MODEL
        """Model's name; any other does as well."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables from which clients of both APIs take URL and key."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def run(
        self, *command: str, text: str = "", cwd: Path | str | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a program that is the agent, with `self.env` and these variables; returns what it wrote to its output.

        `text` is its input. It ends with the episode, and all that it has started with it. Raises RuntimeError where
        its exit code is not 0, with the end of its errors.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-ISc",
            _DIE_WITH_PARENT,
            str(os.getpid()),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env={**_without_secrets(), **self.env, **(env or {})},
            start_new_session=True,
        )
        try:
            said, errors = await process.communicate(text.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            tail = errors.decode(errors="replace").strip()[-_TAIL:]
            raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}: {tail}")
        return said.decode(errors="replace")


def _without_secrets() -> dict[str, str]:
    """The worker's environment but for its own variables, tokens among them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
