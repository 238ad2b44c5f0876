"""A scripted server that takes weights by broadcast as SGLang 0.5.23 does: a process of its own, one rank.

It prints its URL; with `--config FILE`, as `sglang.launch_server` has it, it takes its port from there. `/script` sets
what a test wants and tells what happened. Rank 1 of an engine with two ranks is a second process, to which the first
one passes every weight call on.
"""

import asyncio
import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import httpx
import torch
import uvicorn
from scripted_sglang import ScriptedSglang
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch.distributed import BroadcastOptions, PrefixStore
from torch.distributed import distributed_c10d as dist
from torch.distributed.rendezvous import rendezvous

PATIENCE = timedelta(minutes=30)
"""As SGLang's: whoever waits for a server that waits has to have a deadline of its own."""


def digest(tensor: torch.Tensor) -> list:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


class ReceivingSglang(ScriptedSglang):
    def __init__(self) -> None:
        super().__init__()
        self.follower: str | None = None
        """URL of the next rank."""
        self.rank = 0
        self.groups: dict = {}
        self.session = False
        self.received: dict[str, list] = {}
        self.hold: int | None = None
        """The bucket, counted from 0 since the last `/script`, that is announced and not taken until the next one."""
        self.go = asyncio.Event()
        self.held = False
        self.buckets = 0
        self.app.router.routes.insert(0, Route("/model_info", lambda _: JSONResponse({})))

    async def answer(self, http: Request) -> Response:
        body = await http.json()
        if http.url.path == "/script":
            return self.script(body)
        response = await super().answer(http)
        act = getattr(self, http.url.path.removeprefix("/"), None)
        if response.status_code != 200 or act is None:
            return response
        problems = await asyncio.gather(act(body), self.follow(http.url.path, body))
        problem = next((problem for problem in problems if problem), None)
        return JSONResponse({"success": not problem, "message": problem or ""}, 400 if problem else 200)

    def script(self, body: dict) -> Response:
        if body:
            self.refuse, self.hold = set(body.get("refuse", [])), body.get("hold")
            self.follower, self.rank = body.get("follower"), body.get("rank", 0)
            self.calls, self.buckets, self.held = [], 0, False
            if body.get("new"):
                self.session, self.received = False, {}
                while self.groups:
                    dist.destroy_process_group(self.groups.popitem()[1])
            self.go.set()
            self.go = asyncio.Event()
        return JSONResponse(
            {"calls": self.calls, "received": self.received, "held": self.held, "session": self.session}
            | {"groups": sorted(self.groups)}
        )

    async def follow(self, path: str, body: dict) -> str | None:
        if self.follower is None:
            return None
        async with httpx.AsyncClient(timeout=None) as http:
            answer = await http.post(self.follower + path, json=body)
        return None if answer.status_code == 200 else answer.json()["message"]

    async def init_weights_update_group(self, body: dict) -> str | None:
        try:
            self.groups[body["group_name"]] = await asyncio.to_thread(self.join, body)
        except RuntimeError as error:
            return f"Failed to initialize custom process group: {error}."
        return None

    def join(self, body: dict):
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        rank, size, name = body["rank_offset"] + self.rank, body["world_size"], body["group_name"]
        store, rank, size = next(rendezvous(url, rank, size, timeout=PATIENCE))
        store.set_timeout(PATIENCE)
        backend = dist.Backend(body["backend"])
        group, _ = dist._new_process_group_helper(
            size, rank, [], backend, PrefixStore(name, store), group_name=name, timeout=PATIENCE
        )
        # Only that it can be destroyed.
        dist._world.pg_group_ranks[group] = {i: i for i in range(size)}
        return group

    async def begin_weight_update(self, body: dict) -> str | None:
        if self.session:
            return "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return None

    async def end_weight_update(self, body: dict) -> str | None:
        if not self.session:
            return "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return None

    async def destroy_weights_update_group(self, body: dict) -> str | None:
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            return "The group to be destroyed does not exist."
        dist.destroy_process_group(group)
        return None

    async def update_weights_from_distributed(self, body: dict) -> str | None:
        if not self.session:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        self.buckets += 1
        if self.buckets - 1 == self.hold:
            self.held = True
            await self.go.wait()
        try:
            self.received |= await asyncio.to_thread(self.receive, body)
        except (RuntimeError, KeyError) as error:
            return f"Failed to receive weights: {error}"
        return None

    def receive(self, body: dict) -> dict[str, list]:
        group = self.groups[body["group_name"]]
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = BroadcastOptions()
        options.rootRank = 0
        group.broadcast([flat], options).wait()
        parts = zip(body["names"], flat.split(sizes), dtypes, shapes, strict=True)
        return {name: digest(part.view(dtype).reshape(shape)) for name, part, dtype, shape in parts}


def port() -> int:
    if "--config" not in sys.argv:
        return 0
    return json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["port"]


async def main() -> None:
    server = uvicorn.Server(uvicorn.Config(ReceivingSglang().app, port=port(), log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await task


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
