"""Starts one peer of `benchmarks/proxy.py` as a server; runs in the peer's own venv and knows nothing of Gyre.

python proxy_peers.py NAME PORT UPSTREAM_URL TOKENIZER_DIR
"""

import json
import re
import sys


def agentlightning(port: int, upstream: str, _: str) -> None:
    import uvicorn
    from agentlightning.schemas import Model
    from agentlightning.server.app import create_app
    from agentlightning.server.store import _models

    endpoint = f"{upstream}/v1"
    _models["policy"] = {endpoint: Model(model="policy", endpoint=endpoint)}
    proxy = {"model_name": "policy", "train": {"temperature": 1.0}, "val": {"temperature": 1.0}}
    uvicorn.run(create_app({"key": "bench", "default_proxy": proxy}), port=port, log_level="warning")


def rllm(port: int, upstream: str, _: str) -> None:
    import uvicorn
    from rllm_model_gateway.models import GatewayConfig, WorkerConfig
    from rllm_model_gateway.server import create_app

    workers = [WorkerConfig(url=upstream)]
    uvicorn.run(create_app(GatewayConfig(workers=workers, store_worker="memory")), port=port, log_level="warning")


def agentcore(port: int, upstream: str, tokenizer_dir: str) -> None:
    from agentcore_rl_toolkit.rollout_gateway.gateway import RolloutGateway
    from agentcore_rl_toolkit.rollout_gateway.render import HfTemplateRenderer
    from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend
    from transformers import AutoTokenizer

    def read_calls(text: str, _: list) -> tuple:
        calls = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        uses = [{"name": call["name"], "input": call["arguments"]} for call in calls]
        return text.partition("<tool_call>")[0], uses, False

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    renderer = HfTemplateRenderer(tokenizer, stop_sequences=["<|im_end|>"], tool_parser=read_calls)
    gateway = RolloutGateway(backend=VllmHttpBackend(upstream), renderer=renderer, tokenizer=tokenizer)
    gateway.run("127.0.0.1", port)


if __name__ == "__main__":
    name, port, upstream, tokenizer_dir = sys.argv[1:]
    {"agentlightning": agentlightning, "rllm": rllm, "agentcore": agentcore}[name](int(port), upstream, tokenizer_dir)
