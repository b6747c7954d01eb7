"""Episodes whose tools are those of an MCP server: a real server, and an engine with a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Completion, Request
from spmdrl.rollout.sampled_source import SampledSource
from tests.helpers.drawn import completion
from tests.rollout.agent_runs import Engine, config_of, world_of

SERVER = [sys.executable, str(Path(__file__).parents[1] / "environments" / "mcp_server.py")]
CALL = '<tool_call>{"name": "power", "arguments": {"base": %d}}</tool_call>'


class Caller(Engine):
    """Draws a call of the tool, and after its result the last number that it has read."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer
        self.read: list[str] = []

    def step(self) -> list[Completion]:
        finished = [self._draw(request) for request, *_ in self._open.values()]
        self._open = {}
        return finished

    def _draw(self, request: Request) -> Completion:
        text = self._tokenizer.decode(request.prompt)
        self.read.append(text)
        number = int("".join(c if c.isdigit() else " " for c in text).split()[-1])
        words = str(number) if "tool_call" in text else CALL % number
        tokens = self._tokenizer(words + self._tokenizer.eos_token, add_special_tokens=False)
        return completion(tokens["input_ids"], key=request.key)


def test_a_run_calls_the_tools_of_an_mcp_server(chat_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "7", "answer": "49"}\n{"prompt": "12", "answer": "144"}\n')
    (tmp_path / "exact.py").write_text(
        "def exact(completions, answer, **_):\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    tools = {"mcp": {"server": SERVER, "only": ["power"]}}
    cfg = config_of(
        chat_model,
        tmp_path / "run",
        data=dict(train=str(rows), eval="", max_prompt_tokens=64),
        sampling=dict(max_response_tokens=128),
        rewards=dict(functions=(f"{tmp_path}/exact.py:exact",), workers=1),
        rollout=dict(
            agent="",
            environment={"name": "tools", "tools": tools, "parser": "hermes", "max_turns": 3},
        ),
    )
    tokenizer = load_tokenizer(cfg)
    world = world_of(cfg, is_updated=lambda version: False)
    source = SampledSource(cfg, world, tokenizer=tokenizer)
    try:
        engine: Any = Caller(tokenizer)
        source.start(0)
        source.generate(engine, until=0)
        share = source.take(0)
    finally:
        source.close()
    assert share.scalars.rewards.tolist() == [1.0] * 4
    assert "power(base, exponent, kind)" in engine.read[0]
    total, count = share.sums["environment/tool_calls"]
    assert total / count == 1.0
    assert share.sums["environment/tool_errors"][0] == 0
    # What the server answered is read by the policy, and not trained on.
    for begin, end in zip(share.cu_seqlens, share.cu_seqlens[1:]):
        own = share.tokens[begin:end]
        sampled = tokenizer.decode(own[share.response_mask[begin:end]])
        answer = "49" if "49" in tokenizer.decode(own) else "144"
        assert sampled.endswith(f"</tool_call>{tokenizer.eos_token}{answer}{tokenizer.eos_token}")
