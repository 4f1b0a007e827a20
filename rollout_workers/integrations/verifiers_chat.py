"""A harness for verifiers: the chat loop of its `null` harness, within the worker.

verifiers starts a program for every rollout, which takes a second of one core; a worker has too many samples for that.
This one needs no program: messages go to the interception server as the program's would, and tools are called over MCP,
with the environment's gate asked first.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarnessConfig(vf.HarnessConfig):
    """Nothing beyond what every harness has."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Talks until the model answers without a tool call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """See Harness."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        headers = {"Authorization": f"Bearer {secret}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http, AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = (
                await connect_mcp({"mcpServers": servers}, stack) if servers else ([], {}, {})
            )
            while True:
                body: dict[str, Any] = {"model": ctx.model, "messages": messages}
                if tools:
                    body["tools"] = tools
                async with http.post(f"{endpoint}/chat/completions", json=body) as reply:
                    if reply.status != 200:
                        return vf.ProgramResult(1, "", f"status {reply.status}: {await reply.text()}")
                    answer = await reply.json()
                message = answer["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls") or trace.stop_condition is not None:
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    result = await _denied(http, tool_interception_url, call)
                    if result is None:
                        result = await _call(call, dispatch, connections)
                    messages.append(result)


async def _denied(http: aiohttp.ClientSession, gate: str | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Message that the environment puts in place of the call; None when the call may be made. Raises RuntimeError when
    the environment ends the rollout.
    """
    if gate is None:
        return None
    function = call["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except json.JSONDecodeError:
        arguments = function["arguments"]
    asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
    async with http.post(gate, json=asked) as reply:
        reply.raise_for_status()
        decision = await reply.json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    denied: dict[str, Any] | None = decision["message"] if decision["action"] == "deny" else None
    return denied


async def _call(call: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> dict[str, Any]:
    """The tool's answer as a message."""
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"].get("arguments") or "{}")
    except json.JSONDecodeError as error:
        content: Any = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    else:
        if not isinstance(arguments, dict):
            content = f"error: tool arguments must be a JSON object, got {type(arguments).__name__}"
        elif name not in dispatch:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
