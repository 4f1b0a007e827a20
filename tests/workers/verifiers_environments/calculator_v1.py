"""A verifiers taskset with a tool, an MCP server of verifiers' own: the model has to multiply with it."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """The product of two numbers."""
        return str(a * b)


class ProductData(vf.TaskData):
    answer: str


class ProductTask(vf.Task[ProductData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def used_the_tool(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))


class CalculatorTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterable[ProductTask]:
        for i in range(3, 6):
            yield ProductTask(ProductData(prompt=f"{i}*7=", answer=str(i * 7)), self.config.task)


if __name__ == "__main__":
    CalculatorToolset.run()
